"""Matrix products whose results do not depend on how many rows or columns a rank has.

In float32 and bfloat16 on a CPU, the native kernel adds the products of each element in one order whatever the shapes
are (csrc/common/fixed_products.h). Elsewhere torch's products are used. A library chooses its algorithm, and so the
order of its sums, by shapes and alignment; it is called with one shape for every layout: blocks of ``ROWS`` rows, the
last one filled with zeros, times a canonical part of the weight, both contiguous and at multiples of ``ALIGNMENT``.
Within such a product the result of a row does not depend on its place
(``tests/features/equal_bits/test_fixed_products.py``).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_core.features.equal_bits.exact_sum import UNIT, add_exactly_, largest_addend
from megatron_core.ops import native

ROWS = 128
"""Rows of a product. 1024 x 576 x 3072 in float32 takes 40 ms as one product, 45 ms with 128 rows and three parts, 49
ms with 64 rows (one thread, AVX-512)."""
MULTIPLE = 16
"""Matrices are filled with zeros to multiples of this size: MKL treats rows of products with a sum over 6 elements, or
with up to 11 columns, in different ways."""
ALIGNMENT = 64
"""Bytes; MKL's float32 products depend on smaller offsets."""


class InnerRange(NamedTuple):
    """Inner indices whose products are one addend of a sum."""

    column: int
    """The first one as a column of the left operand."""
    row: int
    """The first one as a row of the right operand."""
    length: int
    additions: int
    """Additions after this addend: each replaces the last two values by their sum. One value is left at the end."""


NATIVE_DTYPES = torch.float32, torch.bfloat16


def is_native(x: Tensor) -> bool:
    """Whether the native kernel multiplies tensors like ``x``; no setting, such as ``kernel_backend``, changes it."""
    return x.is_cpu and x.dtype in NATIVE_DTYPES and native.unavailable_reason("fixed_products", "cpu", x.dtype) is None


def describe_products(device_type: str) -> str:
    """The products of this process, such as ``float32 avx512, bfloat16 amx (libmegatron_cpu_avx512.so)``.

    Processes with different texts compute different bits. On a GPU, torch's products are not described further.
    """
    if device_type != "cpu":
        return "torch's"
    if any(native.unavailable_reason("fixed_products", "cpu", dtype) for dtype in NATIVE_DTYPES):
        return f"torch's for {torch.backends.cpu.get_cpu_capability()}, without the native library"
    kernels = [f"{str(dtype).removeprefix('torch.')} {native.fixed_kernel(dtype)}" for dtype in NATIVE_DTYPES]
    return f"{', '.join(kernels)} ({native.library_path('cpu', torch.float32).name})"


def product_(out: Tensor, x: Tensor, matrix: Tensor, rows: int = ROWS) -> None:
    """out = x matrix: ``x`` ``[R, K]``, ``matrix`` ``[K, N]``, ``out`` ``[R, N]``; see ``sum_of_products_``."""
    if x.shape[1:] != matrix.shape[:1]:
        raise ValueError(f"{_described(x=x, matrix=matrix)}: the columns of x must be the rows of matrix")
    sum_of_products_(out, x, matrix, (InnerRange(0, 0, x.shape[1], 0),), rows)


def sum_of_products_(out: Tensor, x: Tensor, matrix: Tensor, ranges: tuple[InnerRange, ...], rows: int = ROWS) -> None:
    """out = the sum over ``ranges`` of x[:, range] matrix[range]: ``[R, K]``, ``[K', N]`` -> ``[R, N]``.

    The sum of a range, and each sum of two values, is rounded to the dtype of ``out``, in which all tensors are.
    ``rows``: rows of each product of torch. ValueError if shapes, dtypes or devices do not fit.
    """
    _check_operands(out, x, matrix, ranges)
    if is_native(x) and out.stride(1) == 1:
        steps = x.stride(1), matrix.stride(0)
        table = _table(tuple((r.column * steps[0], r.row * steps[1], r.length, r.additions) for r in ranges))
        sizes = x.shape[0], matrix.shape[1]
        native.call(
            "fixed_products", out, out, out.stride(0), x, *x.stride(), matrix, *reversed(matrix.stride()), *sizes,
            table, len(table),
        )  # fmt: skip
        return
    matrices = [matrix[r.row : r.row + r.length] for r in ranges]
    matrices = [
        filled(matrix_of_range, _up(matrix_of_range.shape[0]), _up(matrix_of_range.shape[1]))
        for matrix_of_range in matrices
    ]
    for start in range(0, len(out), rows):
        target = out[start : start + rows]
        values = list[Tensor]()
        for of, weight in zip(ranges, matrices, strict=True):
            block = x[start : start + rows, of.column : of.column + of.length]
            values.append(torch.mm(filled(block, rows, weight.shape[0]), weight))
            for _ in range(of.additions):
                newest = values.pop()
                values[-1] += newest
        (total,) = values
        target.copy_(total[: target.shape[0], : target.shape[1]])


def _check_operands(out: Tensor, x: Tensor, matrix: Tensor, ranges: tuple[InnerRange, ...]) -> None:
    """ValueError unless the tensors have one dtype and device, and contain all that the ranges reach."""
    if not (out.dtype == x.dtype == matrix.dtype and out.device == x.device == matrix.device):
        raise ValueError(f"{_described(out=out, x=x, matrix=matrix)}: dtypes and devices must be equal")
    fits = x.dim() == matrix.dim() == 2 and out.shape == (x.shape[0], matrix.shape[1])
    inside = (
        min(of) >= 0 and of.column + of.length <= x.shape[1] and of.row + of.length <= matrix.shape[0] for of in ranges
    )
    if not (fits and all(inside)):
        raise ValueError(
            f"{_described(out=out, x=x, matrix=matrix)}: out must be [rows of x, columns of matrix], and x and matrix "
            f"must contain {list(ranges)}"
        )


def _described(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(x.shape)} {x.dtype} on {x.device}" for name, x in tensors.items())


@lru_cache(maxsize=1024)
def _table(ranges: tuple[tuple[int, int, int, int], ...]) -> Tensor:
    """The ranges as csrc/common/fixed_products.h reads them: offsets in elements, length and additions."""
    return torch.tensor(ranges, dtype=torch.int64, device="cpu")


def filled(x: Tensor, rows: int, columns: int) -> Tensor:
    """``x``, contiguous and aligned, with zeros below and to the right if it is smaller than ``rows`` x ``columns``."""
    missing = rows - x.shape[0], columns - x.shape[1]
    return nn.functional.pad(x, (0, missing[1], 0, missing[0])) if any(missing) else aligned(x)


def _up(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def aligned(x: Tensor) -> Tensor:
    """The matrix ``x`` itself if it, or its transpose, is contiguous and begins at a multiple of ``ALIGNMENT`` bytes,
    else such a copy; a matrix whose columns are contiguous stays so."""
    if x.stride(-1) == 1:
        is_aligned = not x.is_cpu or x.data_ptr() % ALIGNMENT == 0
        return x if x.is_contiguous() and is_aligned else x.clone(memory_format=torch.contiguous_format)
    return aligned(x.t()).t()


Tokens = tuple[slice, int]
"""A run of positions, and the sequence in which they are."""


def add_chunk_products_(
    total: Tensor, grad: Tensor, x: Tensor, chunks: Iterable[Tokens], columns: Sequence[slice], terms: int
) -> None:
    """total += grad_c^T x_c for each chunk c of tokens, exactly (``ops.exact_sum``): the gradient of a weight.

    ``grad`` ``[S, B, O]`` and ``x`` ``[S, B, I]`` have one dtype; ``total`` ``[O, I]`` is float64. A product is a sum
    in float32 or wider. ``columns`` are the canonical parts of I, of which torch computes a product each; ``terms`` is
    an upper bound of the products that add up over all ranks. ValueError if shapes, dtypes or devices do not fit.
    """
    chunks = list(chunks)
    _check_chunks(total, grad, x, chunks)
    if is_native(x) and total.stride(1) == 1:
        of_chunks = [
            (
                tokens.start * grad.stride(0) + b * grad.stride(1),
                tokens.start * x.stride(0) + b * x.stride(1),
                tokens.stop - tokens.start,
                0,
            )
            for tokens, b in chunks
        ]
        if not of_chunks:
            return
        table = torch.tensor(of_chunks, dtype=torch.int64, device="cpu")
        native.call(
            "add_exact_products", x, total, total.stride(0), grad, grad.stride(2), grad.stride(0), x, x.stride(2),
            x.stride(0), *total.shape, table, len(table), UNIT, largest_addend(terms),
        )  # fmt: skip
        return
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    grad = grad.to(wide)
    for tokens, b in chunks:
        for column_range in columns:
            add_exactly_(total[:, column_range], chunk_product(grad[tokens, b], x[tokens, b, column_range]), terms)


def _check_chunks(total: Tensor, grad: Tensor, x: Tensor, chunks: Sequence[Tokens]) -> None:
    """ValueError unless dtypes and devices are as ``add_chunk_products_`` says, and grad and x contain the chunks."""
    if not (grad.dtype == x.dtype and total.dtype == torch.float64 and total.device == grad.device == x.device):
        raise ValueError(
            f"{_described(total=total, grad=grad, x=x)}: total must be float64, the others of one dtype, on one device"
        )
    fits = grad.dim() == x.dim() == 3 and grad.shape[:2] == x.shape[:2] and total.shape == (grad.shape[2], x.shape[2])
    if not (fits and all(0 <= tokens.start <= tokens.stop <= len(x) and 0 <= b < x.shape[1] for tokens, b in chunks)):
        raise ValueError(
            f"{_described(total=total, grad=grad, x=x)}: they must be [O, I], [S, B, O] and [S, B, I], and contain the "
            f"chunks {chunks}"
        )


def chunk_product(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x over the tokens of a chunk, in float32 or wider: ``[T, O]``, ``[T, I]`` -> ``[O, I]``."""
    return torch.mm(aligned(grad).t(), aligned(x))
