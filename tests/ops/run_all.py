"""Runs every operation, forward and backward, on the GPU, for compute-sanitizer.

Without PyTorch's cache each tensor has separate memory, so that an access beyond its end is outside of all memory:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.ops.run_all
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.bench_ops import as_tuple
from benchmarks.op_cases import CASES, OpCase
from megatron_core import ops
from megatron_core.features.fp8 import casts as fp8
from tests.ops.checks import LOW

# Rows held in registers, and longer rows.
SHAPES = ((37, 256), (9, 384), (6, 65536))
SIZES = (1, 7, 1030, *[16391] * 70)
"""Sizes of a list of tensors: ends of packs and of chunks, and more tensors than a table has."""


def off_16_bytes(x: Tensor) -> Tensor:
    """The same with rows that cannot be read in packs of 16 bytes."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x.detach())
    return moved.requires_grad_(x.requires_grad)


def run(case: OpCase, inputs: list[Tensor]) -> bool:
    """Both passes of one operation; returns whether all results are finite."""
    outputs = as_tuple(case.function(*inputs, backend="native"))
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, [torch.randn_like(y) for y in outputs])
    return _are_finite([*outputs, *grads])


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.isfinite().all() for tensor in tensors)


def run_on_lists(dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """The operations on lists of tensors, aligned to 16 bytes or not; returns whether all results are finite."""
    finite = True
    for allocate in (off_16_bytes, torch.clone):
        grads, copies = ([allocate(torch.randn(size).to(dtype)) for size in sizes] for _ in range(2))
        weights, averages, squares = ([allocate(torch.rand(size)) for size in sizes] for _ in range(3))
        norm = ops.squared_norm(grads, backend="native")
        ops.scale_(grads, 0.5, backend="native")
        rates = {"lr": 1e-3, "betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1}
        lists = (grads, weights, averages, squares, *([] if dtype == torch.float32 else [copies]))
        ops.adamw_(*lists, step=1, **rates, backend="native")
        finite &= _are_finite([norm, *grads, *weights, *averages, *squares, *copies])
    return finite


def run_casts(dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    """Casts to FP8 with all kinds of blocks and orders, with rows aligned to 16 bytes or not."""
    blocks = (fp8.WHOLE, fp8.ROWS, fp8.Blocks(1, 128), fp8.Blocks(128, 128), fp8.Blocks(32, 1))
    tensors = [allocate(torch.randn(shape).to(dtype)) for allocate in (off_16_bytes, torch.clone)]
    orders = [{"rows": each, "columns": other} for each in blocks for other in (each, each.t())]
    made = [fp8.quantise_orders(x, fp8.E4M3, each, backend="native") for x in tensors for each in orders]
    return _are_finite([cast.dequantised(torch.float32) for casts in made for cast in casts.values()])


def run_all(shapes: Sequence[tuple[int, int]], sizes: Sequence[int]) -> dict[str, bool]:
    """Every operation on these sizes, in all data types of GPUs: name -> whether all results were finite."""
    finite = {}
    for op, case in CASES.items():
        drawn = (case.inputs(*shape, dtype) for dtype in LOW for shape in shapes)
        placed = (tensors for aligned in drawn for tensors in (aligned, [off_16_bytes(tensor) for tensor in aligned]))
        finite[op] = all([run(case, tensors) for tensors in placed])
        print(op, flush=True)
    finite["casts to FP8"] = all([run_casts(dtype, shape) for dtype in LOW for shape in shapes])
    finite["lists of tensors"] = all([run_on_lists(dtype, sizes) for dtype in LOW])
    return finite


def main() -> int:
    """Run them; returns 1 without a GPU, or if a result is not finite."""
    if not torch.cuda.is_available():
        print("tests.ops.run_all needs a GPU, and torch sees none")
        return 1
    torch.set_default_device("cuda")
    wrong = [op for op, finite in run_all(SHAPES, SIZES).items() if not finite]
    if wrong:
        print(f"not finite: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
