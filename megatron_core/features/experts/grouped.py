"""Products of groups of rows with a matrix per group: the linear layers of the experts of a rank.

Rows are ordered by group; ``counts`` are the numbers of rows of the groups, integers >= 0. Each function has one loop
over groups, which is its definition and runs where no product of torch computes all groups at once.
"""

# Which product computes all groups at once depends on the result:
# - outputs and input gradients: ``torch.nn.functional.grouped_mm``;
# - weight gradients in the dtype of the factors: the same, on GPUs; on a CPU it is a loop, too;
# - weight gradients added to a wider ``main_grad``: one batched product over padded groups, on GPUs. torch's grouped
#   product returns the dtype of its factors (torch 2.13), so its weight gradients would be rounded to 16 bits before
#   the addition. The batched product adds in the dtype of ``main_grad``.

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_core.ops.matmul import accumulate_weight_grad_
from megatron_core.ops.rows import copied_to

ALIGNMENT = 16
"""torch's grouped product requires rows whose size is a multiple of this number of bytes."""
MOST_PADDING = 2.0
"""Largest number of rows with padding, relative to the rows without, for which weight gradients are batched."""
# Public since torch 2.10; earlier there was a private function with other requirements.
_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)


def runs(counts: Sequence[int]) -> Iterator[slice]:
    """Yield the slice of rows of each group."""
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count


def ends_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """The first row after each group, int32 ``[E]``."""
    return copied_to(accumulate(counts), torch.int32, device)


def grouped_product(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """y_r = x_r W_e, where row r belongs to group e: ``x`` ``[R, I]``, ``weight`` ``[E, I, O]`` -> ``[R, O]``.

    Calls torch's ``grouped_mm`` if ``is_grouped`` holds; else one product per group, with the same result.
    """
    if is_grouped(x, weight.shape[1:]):
        assert _grouped_mm is not None
        return _grouped_mm(x.contiguous(), weight, offs=ends_of(counts, x.device))
    # Each product writes its rows of the result, so that no concatenation copies them.
    y = x.new_empty(x.shape[0], weight.shape[2])
    for run, matrix in zip(runs(counts), weight, strict=True):
        torch.mm(x[run], matrix, out=y[run])
    return y


def is_grouped(x: Tensor, extents: Sequence[int]) -> bool:
    """Whether torch's grouped product supports ``x`` and matrices of these extents: float32 or narrower, rows aligned
    to 16 bytes, at least 1 row."""
    aligned = all(extent * x.element_size() % ALIGNMENT == 0 for extent in extents)
    return _grouped_mm is not None and x.dtype != torch.float64 and aligned and x.shape[0] > 0


def grouped_weight_grad(grad_y: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """dL/dW_e = grad_y_e^T x_e in the dtype of both: ``[R, O]``, ``[R, I]`` -> ``[E, O, I]``; 0 without rows.

    One product per group on a CPU, where torch's grouped product is a loop: 64 groups of 32 rows, 256 x 512, take 26 ms
    instead of 66 (torch 2.13).
    """
    if x.is_cuda and is_grouped(x, (grad_y.shape[1], x.shape[1])):
        assert _grouped_mm is not None
        total = _grouped_mm(grad_y.contiguous().t(), x.contiguous(), offs=ends_of(counts, x.device))
        for group, count in enumerate(counts):
            if not count:
                total[group].zero_()  # torch does not document a group without rows
        return total
    total = x.new_empty(len(counts), grad_y.shape[1], x.shape[1])
    for run, gradient in zip(runs(counts), total, strict=True):
        torch.mm(grad_y[run].t(), x[run], out=gradient)
    return total


def accumulate_grouped_weight_grad_(main_grad: Tensor, grad_y: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """main_grad_e += grad_y_e^T x_e, not rounded to fewer bits than ``main_grad`` ``[E, O, I]`` has.

    One batched product if ``is_batched`` holds, else ``accumulate_weight_grad_`` for each group.
    """
    if is_batched(main_grad, x, counts):
        groups = _padded((grad_y, x), counts)
        torch.baddbmm(main_grad, groups[0].mT, groups[1], out_dtype=main_grad.dtype, out=main_grad)
        return
    for run, gradient in zip(runs(counts), main_grad, strict=True):
        if run.start < run.stop:
            accumulate_weight_grad_(gradient, grad_y[run], x[run])


def is_batched(main_grad: Tensor, x: Tensor, counts: Sequence[int]) -> bool:
    """Whether one product of torch adds the weight gradients of all groups: 16-bit factors on a GPU, torch 2.10 or
    later, and groups of similar sizes, because each is padded to the largest."""
    narrow = x.dtype in (torch.bfloat16, torch.float16) and main_grad.dtype == torch.float32
    if not (x.is_cuda and narrow and len(counts) > 1 and TorchVersion(torch.__version__) >= "2.10"):
        return False
    return 0 < max(counts) * len(counts) <= MOST_PADDING * sum(counts)


def _padded(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Each ``[R, n]`` as ``[E, longest, n]``, filled with zeros."""
    longest = max(counts)
    # Groups of equal sizes, as with a capacity, need no copy.
    if min(counts) < longest:
        device = tensors[0].device
        row = torch.arange(len(tensors[0]), device=device)
        group = torch.searchsorted(ends_of(counts, device).long(), row, right=True)
        # Padding moves the rows of each group by one distance, so the targets need one addition.
        shifts = (number * longest - run.start for number, run in enumerate(runs(counts)))
        target = row + copied_to(shifts, torch.int64, device)[group]
        size = len(counts) * longest
        tensors = [rows.new_zeros(size, rows.shape[1]).index_copy_(0, target, rows) for rows in tensors]
    return [rows.unflatten(0, (len(counts), longest)) for rows in tensors]
