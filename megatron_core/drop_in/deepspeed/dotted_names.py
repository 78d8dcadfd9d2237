"""Names with dots in a JSON configuration, which look like paths of keys and are none."""

from collections.abc import Iterator, Mapping
from typing import Any

NAMES_OF_TRL = frozenset(
    "zero_optimization." + name
    for name in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
)
"""Names that ``prepare_deepspeed`` of trl writes for reference models; DeepSpeed ignores them, too."""


def dotted_names(values: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """All names with a dot, which look like paths of keys, with the path of each."""
    for name, value in values.items():
        if "." in str(name):
            yield str(name), f"{above}{name}"
        elif isinstance(value, Mapping):
            yield from dotted_names(value, f"{above}{name}.")


def nested(name: str) -> str:
    """Return the JSON of a dotted name as sections."""
    first, _, others = name.partition(".")
    return f'{{"{first}": {nested(others)}}}' if others else f'{{"{first}": ...}}'
