"""Splits, blends, and the compilation of helpers, which does nothing here."""

from collections.abc import Sequence
from enum import Enum

from megatron_core.datasets.blend import parse_blend
from megatron_core.features.megatron_order.blend_index import normalize


class Split(Enum):
    """The three uses of data."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Do nothing: numpy builds the indices."""


def get_blend_from_list(blend: Sequence[str] | None) -> tuple[list[str], list[float] | None] | None:
    """Return (prefixes, weights or None) of a list `weight prefix weight prefix ...` or of prefixes only.

    Raises ConfigError if some but not all of the weights are numbers.
    """
    if blend is None:
        return None
    weights, prefixes = parse_blend([str(item) for item in blend])
    return list(prefixes), None if weights is None else list(weights)
