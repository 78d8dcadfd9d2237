"""Grouped matrix products: the linear layers of all experts of a rank in one call."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""torch's grouped product requires rows whose size is a multiple of this number of bytes."""
_grouped_mm = getattr(
    torch.nn.functional, "grouped_mm", None
)  # since torch 2.10; before, a private function with other requirements


def runs(counts: Sequence[int]) -> Iterator[slice]:
    """Yield the slice of rows of each group: ``counts[e]`` rows of group e, in the order of groups."""
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count


def grouped_product(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """y_r = x_r W_e, where row r belongs to group e: ``x`` ``[R, I]``, ``weight`` ``[E, I, O]`` -> ``[R, O]``.

    ``counts`` is the number of rows of each group: E integers >= 0 with the sum R. Calls torch's ``grouped_mm`` if
    ``is_grouped`` holds; else one product per group, with the same result.
    """
    if is_grouped(x, weight):
        assert _grouped_mm is not None
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return _grouped_mm(x.contiguous(), weight, offs=ends.to(x.device, non_blocking=True))
    y = x.new_empty(x.shape[0], weight.shape[2])
    for run, matrix in zip(runs(counts), weight, strict=True):
        torch.mm(x[run], matrix, out=y[run])
    return y


def is_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product supports these: float32 or narrower, rows aligned to 16 bytes, at least 1 row."""
    aligned = all(extent * x.element_size() % ALIGNMENT == 0 for extent in weight.shape[1:])
    return _grouped_mm is not None and x.dtype != torch.float64 and aligned and x.shape[0] > 0
