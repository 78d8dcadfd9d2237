"""All rows of the parity matrix by name, and the sample of the default run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any
from zlib import crc32

from tests.parity.context_rows import CONTEXT_ROWS
from tests.parity.fp8_rows import FP8_ROWS
from tests.parity.lora_rows import LORA_ROWS
from tests.parity.outer_rows import OUTER_ROWS
from tests.parity.rows import ROWS
from tests.parity.stability_rows import STABILITY_ROWS
from tests.sample import WHOLE_MATRIX

EVERY_ROW = ROWS | CONTEXT_ROWS | FP8_ROWS | LORA_ROWS | STABILITY_ROWS | OUTER_ROWS
AXES = {
    "context_parallel_size",
    "expert_model_parallel_size",
    "fp8_recipe",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "recompute_granularity",
    "sequence_parallel",
    "tensor_model_parallel_size",
    "use_distributed_optimizer",
    "zero_stage",
}
"""Settings of which every value, and every pair, is covered."""
CHOICE = re.compile(r"[a-z][a-z0-9_+.-]*")
"""A name such as ``zb_h1``, not a pattern of layers such as ``M*-`` or a list in JSON."""
FAST_ROW = "dp2 tp2 sp, overlap"
"""The row of ``make test-fast``."""
PAIRS_ROW = "capacity and shared experts, ep2 zero2, recompute, in pairs"
"""The row with the overlaps of experts that every run has, in processes; of rows in FP8 a run has only some."""


def features(settings: Mapping[str, Any]) -> set[object]:
    """Every setting, with its value if that is one of a few: a switch, a choice, or the size of an axis."""
    return {f"{name}={value}" if name in AXES or _is_choice(value) else name for name, value in settings.items()}


def _is_choice(value: Any) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, str) and bool(CHOICE.fullmatch(value)))


def shown_by(row: str) -> set[object]:
    """Features covered by a row: those of its settings, every pair of axes, and the number of ranks."""
    ranks, model, layout = EVERY_ROW[row]
    settings = model | layout
    return {("ranks", ranks), *features(settings), *combinations(sorted(settings.keys() & AXES), 2)}


def cover(shows: Mapping[str, set[object]], cost: Callable[[str], int], first: Iterable[str] = ()) -> frozenset[str]:
    """``first`` and a few cheap names that together cover all features of all names.

    Greedy: the next name covers most new features for its cost; ties are broken by checksums of the names.
    """
    chosen = list(first)
    left = set().union(*shows.values()).difference(*(shows[name] for name in chosen))
    while left:
        chosen.append(max(shows, key=lambda name: (len(shows[name] & left) / cost(name), crc32(name.encode()))))
        left -= shows[chosen[-1]]
    return frozenset(chosen)


SAMPLE = cover({row: shown_by(row) for row in EVERY_ROW}, lambda row: 1 + EVERY_ROW[row][0], [FAST_ROW, PAIRS_ROW])
"""The rows of the default run, which cover all features of all rows."""


def drawn(rows: Iterable[str]) -> list[str]:
    """All of ``rows`` in the whole matrix, else those in the sample."""
    return [row for row in rows if WHOLE_MATRIX or row in SAMPLE]
