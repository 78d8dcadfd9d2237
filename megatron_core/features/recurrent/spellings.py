"""Reads patterns of layers: letters of Megatron-LM's patterns stand for further settings."""

from collections.abc import Iterable
from typing import Any

from megatron_core.config.flags import Group, Spellings, Translation, plain, to_flag
from megatron_core.config.run import aliases
from megatron_core.features.recurrent.settings import STAGE, read_pattern

PATTERN = "hybrid_layer_pattern"
LAYOUT = "pipeline_model_parallel_layout"
AHEAD = "mtp_num_layers"


class PatternSpellings(Spellings):
    """Replaces a pattern of layers by its letters, and adds the settings that it implies."""

    def replace(self, groups: list[Group]) -> list[Group]:
        """Add the flags that a pattern implies, unless one of these is given, too."""
        expanded: list[Group] = []
        names = {plain(flag) for flag, _ in groups}
        for flag, values in groups:
            if _is_pattern(flag) and len(values) == 1:
                letters, implied = _implied(values[0])
                counts = [counts for other, counts in groups if plain(other) == AHEAD]
                agrees = AHEAD not in implied or all(count == [str(implied[AHEAD])] for count in counts)
                if LAYOUT not in implied.keys() & names and agrees:
                    values = [letters]
                    for name, value in implied.items():
                        if name not in names:
                            expanded.append((to_flag(name), [] if value is True else [str(value)]))
            expanded.append((flag, values))
        return expanded

    def read(self, flag: str, values: list[str], line: Translation) -> Iterable[Group]:
        """Refuse a pattern that ``replace`` has left as it was, because a second flag assigns layers to stages."""
        if not _is_pattern(flag) or STAGE not in "".join(values):
            return [(flag, values)]
        line.faults.append(
            f"{flag} {values[0]}: --pipeline-model-parallel-layout also assigns layers to stages; remove it or the "
            f"{STAGE}"
        )
        return []

    def implied(self, name: str, value: Any) -> tuple[Any, dict[str, Any]]:
        """The letters of a pattern, and the settings that it implies."""
        return _implied(value) if name == PATTERN and value is not None else (value, {})


def _implied(pattern: str) -> tuple[str, dict[str, Any]]:
    """As ``read_pattern``, with the number of layers."""
    letters, implied = read_pattern(pattern)
    return letters, implied | ({"num_layers": len(letters)} if letters else {})


def _is_pattern(flag: str) -> bool:
    return aliases().get(plain(flag), plain(flag)) == PATTERN
