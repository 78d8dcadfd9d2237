"""Properties of this machine's matrix products (MKL, oneDNN) on which equal bits rely.

If one of these tests fails on a machine, ``--layout-invariant`` does not hold there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.ops.fixed_products import aligned, chunk_product, product_, product_of_parts

SIZES = [(1, 1), (3, 5), (6, 6), (6, 8), (16, 6), (24, 11), (64, 72), (192, 100), (576, 320)]
DTYPES = [torch.float32, torch.bfloat16]


def _product(x: Tensor, matrix: Tensor, rows: int) -> Tensor:
    out = x.new_empty(x.shape[0], matrix.shape[1])
    product_(out, x, matrix, rows)
    return out


def _elsewhere(x: Tensor, offset: int) -> Tensor:
    """The same values at another address and with another distance between rows."""
    memory = torch.empty(offset + x.shape[0] * (x.shape[1] + 5), dtype=x.dtype)
    view = memory[offset:].view(x.shape[0], -1)[:, : x.shape[1]]
    return view.copy_(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inner", "columns"), SIZES)
def test_a_row_does_not_depend_on_the_others(inner: int, columns: int, transposed: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inner + columns)
    for rows in (32, 128):
        x = torch.randn(300, inner, generator=generator).to(dtype)
        matrix = torch.randn(columns, inner, generator=generator).to(dtype).t()
        matrix = matrix if transposed else matrix.contiguous()
        whole = _product(x, matrix, rows)
        assert torch.allclose(whole.double(), x.double() @ matrix.double(), rtol=0.02, atol=0.3)
        for count in (1, 2, 3, 31, 33, 140):
            chosen = torch.randperm(len(x), generator=generator)[:count]
            assert torch.equal(_product(x[chosen], matrix, rows), whole[chosen])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addresses_and_strides_do_not_matter(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for inner, columns in SIZES:
        x, matrix = (torch.randn(n, inner, generator=generator).to(dtype) for n in (40, columns))
        expected = _product(x, matrix.t(), 32)
        for offset in (1, 7, 16):
            assert torch.equal(_product(_elsewhere(x, offset), _elsewhere(matrix, offset + 2).t(), 32), expected)


def test_products_over_a_chunk() -> None:
    """Weight gradients: the sum over tokens has one shape, whatever surrounds the chunk."""
    generator = torch.Generator().manual_seed(4)
    for tokens, outputs, inputs in ((2, 8, 6), (4, 32, 24), (16, 96, 64), (100, 72, 48)):
        grad, x = (torch.randn(tokens, size, generator=generator) for size in (outputs, inputs))
        expected = chunk_product(grad, x)
        for offset in (1, 7, 16):
            assert torch.equal(chunk_product(_elsewhere(grad, offset), _elsewhere(x, offset)), expected)


def test_parts_are_joined_by_blocks() -> None:
    x, matrix = torch.randn(5, 12), torch.randn(12, 7)
    parts = [(x[:, at], matrix[at]) for at in (slice(0, 4), slice(4, 12))]
    found = product_of_parts(parts, lambda sums: sums[0] + sums[1], 2)
    assert torch.allclose(found, x @ matrix, atol=1e-5)


def test_a_copy_keeps_the_order_in_memory() -> None:
    x = torch.zeros(100)[1:65].view(4, 16)
    assert aligned(x).data_ptr() % 64 == 0 and aligned(x).is_contiguous()
    assert aligned(x.t()).data_ptr() % 64 == 0 and aligned(x.t()).t().is_contiguous()
