"""Matrix products whose results do not depend on how many rows or columns a rank has.

A library for matrix products chooses its algorithm, and so the order of its sums, by shapes and alignment. These
functions call it with one shape for every layout: blocks of ``ROWS`` rows, the last one filled with zeros, times a
canonical part of the weight, both contiguous and at multiples of ``ALIGNMENT``. Within such a product the result of a
row does not depend on its place (``tests/ops/test_fixed_products.py``).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

ROWS = 128
"""Rows of a product. 1024 x 576 x 3072 in float32 takes 40 ms as one product, 45 ms with 128 rows and three parts, 49
ms with 64 rows (one thread, AVX-512)."""
MULTIPLE = 16
"""Matrices are filled with zeros to multiples of this size: MKL treats rows of products with a sum over 6 elements, or
with up to 11 columns, in different ways."""
ALIGNMENT = 64
"""Bytes; MKL's float32 products depend on smaller offsets."""


def product_(out: Tensor, x: Tensor, matrix: Tensor, rows: int = ROWS) -> None:
    """out = x matrix: ``x`` ``[R, K]``, ``matrix`` ``[K, N]``, ``out`` ``[R, N]``, in blocks of ``rows`` rows."""
    out.copy_(product_of_parts([(x, matrix)], lambda sums: sums[0], rows))


def product_of_parts(
    parts: Sequence[tuple[Tensor, Tensor]], join: Callable[[list[Tensor]], Tensor], rows: int = ROWS
) -> Tensor:
    """join([x_p matrix_p for each part p]) ``[R, N]``: ``parts`` are pairs of ``[R, K_p]`` and ``[K_p, N]``.

    ``join`` receives the partial sums of a block of rows and returns their sum.
    """
    (first, matrix), *_ = parts
    out = first.new_empty(first.shape[0], matrix.shape[1])
    matrices = [filled(matrix, _up(matrix.shape[0]), _up(matrix.shape[1])) for _, matrix in parts]
    for start in range(0, len(out), rows):
        target = out[start : start + rows]
        blocks = [filled(x[start : start + rows], rows, _up(x.shape[1])) for x, _ in parts]
        sums = [torch.mm(block, matrix) for block, matrix in zip(blocks, matrices, strict=True)]
        target.copy_(join(sums)[: target.shape[0], : target.shape[1]])
    return out


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
        return x if x.is_contiguous() and _begins_aligned(x) else x.clone(memory_format=torch.contiguous_format)
    return aligned(x.t()).t()


def _begins_aligned(x: Tensor) -> bool:
    return not x.is_cpu or x.data_ptr() % ALIGNMENT == 0


def chunk_product(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x over the tokens of a chunk, in float32 or wider: ``[T, O]``, ``[T, I]`` -> ``[O, I]``."""
    return torch.mm(aligned(grad).t(), aligned(x))
