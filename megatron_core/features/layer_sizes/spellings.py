"""Reads the JSON of layers with sizes of their own from a flag, or from a file that a flag names."""

from collections.abc import Iterable
from typing import Any

from megatron_core.config.flags import Group, Spellings, Translation, only, plain, to_flag
from megatron_core.errors import ConfigError, shortened
from megatron_core.features.layer_sizes.settings import LAYERS_FILE, LAYERS_JSON, compact_json, read_layers_file


class LayerSizesSpellings(Spellings):
    """Replaces the name of a file by its JSON, and leaves out the keys of the JSON that are not read."""

    def read(self, flag: str, values: list[str], line: Translation) -> Iterable[Group]:
        """Add the JSON of a flag."""
        name = plain(flag)
        if name not in (LAYERS_FILE, LAYERS_JSON):
            return [(flag, values)]
        try:
            text = read_layers_file(only(values)) if name == LAYERS_FILE else compact_json(only(values))
        except ConfigError as error:
            line.faults.append(str(error))
        except ValueError as error:
            line.faults.append(f"{flag} {shortened(' '.join(values))}: {shortened(str(error))}")
        else:
            line.strong.append(f"{to_flag(LAYERS_JSON)}={text}")
        return []

    def entry(self, name: str, value: Any) -> tuple[str, Any]:
        """The JSON of a file that an entry names."""
        if name != LAYERS_FILE:
            return name, value
        return LAYERS_JSON, None if value is None else read_layers_file(str(value))
