"""Native casts to FP8 are bitwise equal to the reference, which tests/ops/test_fp8.py checks by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_core.features.fp8.casts import (
    COLUMNS,
    E4M3,
    E5M2,
    ROWS,
    WHOLE,
    Blocks,
    Order,
    Quantised,
    block_amax,
    cast_to_fp8,
    quantise,
    scale_of,
)
from megatron_core.features.fp8.scaled_product import product
from megatron_core.ops import native

SHAPES = [(256, 384), (130, 200), (3, 5), (1, 129), (2, 64, 96)]
BLOCKS = [WHOLE, ROWS, COLUMNS, Blocks(1, 128), Blocks(128, 1), Blocks(128, 128), Blocks(1, 32), Blocks(32, 1)]
CASTS = [torch.float32, torch.bfloat16, torch.float16]


def matrix(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of very different magnitudes, with zeros, an empty block and the smallest and largest of the dtype."""
    generator = torch.Generator(device="cpu").manual_seed(3)
    x, sizes = (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for _ in range(2))
    x = x * 10.0 ** (1.5 * sizes)
    x[..., ::7, :] = 0
    x = x.clamp(-6e4, 6e4).to(dtype)
    x[..., 0, 0] = torch.finfo(dtype).tiny
    return x.to(torch.get_default_device())


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same(found: Quantised, expected: Quantised) -> None:
    assert torch.equal(found.scale, expected.scale) and found.blocks == expected.blocks
    for data in (found.data, found.other):
        assert data is None or torch.equal(bits(data), bits(expected.data))


@pytest.mark.parametrize("order", ["rows", "columns", "both"])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_casts_are_those_of_the_reference(
    kernels: str, dtype: torch.dtype, shape: tuple[int, ...], blocks: Blocks, order: Order
) -> None:
    x = matrix(shape, dtype)
    amax = block_amax(x, blocks, backend="reference").float()
    assert torch.equal(block_amax(x, blocks, backend="native"), amax)
    for narrow, power_of_two in ((E4M3, False), (E5M2, True)):
        scale = scale_of(amax, narrow, power_of_two=power_of_two)
        expected = cast_to_fp8(x, scale, narrow, blocks, backend="reference")
        same(cast_to_fp8(x, scale, narrow, blocks, order=order, backend="native"), expected)
        same(quantise(x, narrow, blocks, power_of_two=power_of_two, order=order, backend="native"), expected)
        clamped = cast_to_fp8(x, scale * 3, narrow, blocks, order=order, backend="native")
        same(clamped, cast_to_fp8(x, scale * 3, narrow, blocks, backend="reference"))


@pytest.mark.parametrize("blocks", BLOCKS[:6], ids=str)
def test_float64_has_kernels_on_cpus(cpu_kernels: None, blocks: Blocks) -> None:
    x = matrix((130, 200), torch.float64)
    found = quantise(x, E4M3, blocks, order="both", backend="native")
    same(found, quantise(x, E4M3, blocks, backend="reference"))


def test_every_float_of_16_bits(kernels: str) -> None:
    """All bfloat16 and float16 numbers, including NaN, at scale 1; the sign of NaN is ignored."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
        one = torch.ones(1, 1)
        for narrow in (E4M3, E5M2):
            expected = cast_to_fp8(x, one, narrow, WHOLE, backend="reference").data
            found = cast_to_fp8(x, one, narrow, WHOLE, backend="native").data
            is_nan = x.isnan()
            assert torch.equal(bits(found)[~is_nan], bits(expected)[~is_nan])
            assert found.float().isnan().equal(is_nan)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan(kernels: str, bad: float) -> None:
    x = torch.randn(4, 256, dtype=torch.float32)
    x[1, 3] = bad
    found = quantise(x, E5M2, Blocks(1, 128), backend="native")
    assert found.scale.isnan().tolist() == [[row == 1 and half == 0 for half in range(2)] for row in range(4)]
    assert found.data.float().isnan()[1, :128].all() and not found.data.float().isnan()[[0, 2, 3]].any()


def test_products_take_the_order_that_they_read(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy: both matrices are contiguous along the summed dim."""
    a, b = matrix((48, 64), torch.bfloat16), matrix((64, 32), torch.bfloat16)
    left = quantise(a, E4M3, WHOLE, order="both", backend="native")
    right = quantise(b, E4M3, WHOLE, order="columns", backend="native")
    assert left.by_rows().data_ptr() == left.data.data_ptr()
    assert left.t().by_rows().data_ptr() == left.other.data_ptr()
    assert right.t().by_rows().data_ptr() == right.data.data_ptr()
    plain = [quantise(x, E4M3, WHOLE, backend="reference") for x in (a, b)]
    assert torch.equal(product(left, right, torch.float32), product(*plain, torch.float32))


def test_unusual_blocks_take_the_reference(cpu_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: object) -> None:
        raise AssertionError("there is no kernel for these blocks")

    monkeypatch.setattr(native, "call", called)
    x = matrix((12, 24), torch.float32)
    for blocks in (Blocks(3, 8), Blocks(1, 256), Blocks(1, 1)):
        quantise(x, E4M3, blocks)
    quantise(x[:0], E4M3)
