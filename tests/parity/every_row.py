"""All rows of the parity matrix by name, and the sample of the default run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
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
"""Settings whose pairs are also covered."""
FAST_ROW = "dp2 tp2 sp, overlap"
"""The row of ``make test-fast``."""


def shown_by(row: str) -> set[object]:
    """Features covered by a row: every setting with its value, every pair of axes, and the number of ranks."""
    ranks, model, layout = EVERY_ROW[row]
    settings = model | layout
    return {("ranks", ranks), *map(str, settings.items()), *combinations(sorted(settings.keys() & AXES), 2)}


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


SAMPLE = cover({row: shown_by(row) for row in EVERY_ROW}, lambda row: 1 + EVERY_ROW[row][0], [FAST_ROW])
"""The rows of the default run, which cover all features of all rows."""


def drawn(rows: Iterable[str]) -> list[str]:
    """All of ``rows`` in the whole matrix, else those in the sample."""
    return [row for row in rows if WHOLE_MATRIX or row in SAMPLE]
