"""Native casts to FP8 are bitwise equal to the reference, which tests/ops/test_fp8.py checks by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_core.features.fp8.amax_history import roll
from megatron_core.features.fp8.casts import (
    COLUMNS,
    E4M3,
    E5M2,
    ROWS,
    WHOLE,
    Blocks,
    Order,
    Quantised,
    Scales,
    block_amax,
    cast_recording,
    cast_to_fp8,
    quantise,
    quantise_orders,
    scale_of,
)
from megatron_core.features.fp8.native_casts import amaxes_of_list
from megatron_core.features.fp8.products import FP8Products
from megatron_core.features.fp8.scaled_product import product
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.ops import native
from megatron_core.parallel.groups import ALONE
from tests.ops.run_all import off_16_bytes

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
    assert torch.equal(bits(found.data), bits(expected.data))
    assert torch.equal(found.inverse, expected.scale.reciprocal())


@pytest.mark.parametrize("order", ["rows", "columns"])
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
    expected = quantise(x, E4M3, blocks, backend="reference")
    for found in quantise_orders(x, E4M3, {"rows": blocks, "columns": blocks}, backend="native").values():
        same(found, expected)


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
    orders = quantise_orders(a, E4M3, {"rows": WHOLE, "columns": WHOLE}, backend="native")
    left = orders["rows"]
    right = quantise(b, E4M3, WHOLE, order="columns", backend="native")
    assert left.data.is_contiguous() and orders["columns"].data.mT.is_contiguous() and right.data.mT.is_contiguous()
    assert orders["columns"].scale.data_ptr() == left.scale.data_ptr()
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


TALL, BROAD = (4230, 6), (5, 2200)
"""More tiles in a direction than parts in which the largest numbers are found."""


@pytest.mark.parametrize("orders", [(WHOLE, WHOLE), (ROWS, COLUMNS), (Blocks(1, 128), Blocks(128, 1))], ids=str)
@pytest.mark.parametrize("shape", [(130, 200), (2, 64, 96), TALL, BROAD, (1, 1)], ids=str)
def test_both_orders_of_one_cast(kernels: str, shape: tuple[int, ...], orders: tuple[Blocks, Blocks]) -> None:
    """Each with its own scales; row-major and column-major, also from amaxes that were changed in between."""
    x = matrix(shape, torch.bfloat16)
    by_order = dict(zip(("rows", "columns"), orders, strict=True))

    def change(amax: Tensor, blocks: Blocks) -> None:
        amax.mul_(3)

    for change_amax in (None, change):
        for order, found in quantise_orders(
            x, E4M3, by_order, power_of_two=True, backend="native", change_amax=change_amax
        ).items():
            expected = quantise_orders(
                x, E4M3, {order: by_order[order]}, power_of_two=True, backend="reference", change_amax=change_amax
            )[order]
            same(found, expected)
            assert (found.data if order == "rows" else found.data.mT).is_contiguous()


@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_a_cast_records_the_largest_value(kernels: str, dtype: torch.dtype) -> None:
    """It is raised, not replaced; what is not finite becomes NaN, and the maximum shows it."""
    x = matrix((150, 140), dtype)
    scales = Scales(torch.tensor(0.37), torch.tensor(0.37).reciprocal())
    for before, bad in ((0.0, None), (7e4, None), (1.0, math.inf), (1.0, -math.inf), (1.0, math.nan)):
        value = x.clone()
        if bad is not None:
            value[147, 139] = bad
        recorded = torch.tensor([2.0, before, 3.0])
        found = cast_recording(value, scales, E5M2, ["rows", "columns"], recorded[1], backend="native")
        most = torch.maximum(torch.tensor(before), value.abs().amax().float())
        assert torch.equal(recorded, torch.stack([torch.tensor(2.0), most, torch.tensor(3.0)])) or bad is math.nan
        assert recorded[1].isnan().item() == (bad is math.nan)
        expected = cast_to_fp8(value, scales.scale.view(1, 1), E5M2, WHOLE, backend="reference")
        for order in found.values():
            is_finite = value.isfinite()
            assert torch.equal(bits(order.data)[is_finite], bits(expected.data)[is_finite])
            assert torch.equal(order.data.float().isnan(), ~is_finite)
            assert order.inverse.item() == scales.inverse.item()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_histories_are_rolled_in_one_launch(kernels: str, algorithm: str) -> None:
    """As the reference: with an amax of 0, and amaxes that are not finite."""
    settings = FP8Config(
        fp8_format="hybrid", fp8_recipe="delayed", fp8_margin=2, fp8_amax_history_len=3, fp8_amax_compute_algo=algorithm
    )
    latest = torch.tensor([[1.0, 0.0, 5e4], [math.inf, 2.0, math.nan], [0.0, 3e-20, 0.0]])
    history = torch.tensor([[[2.0, 3.0, 4.0], [0.0, 9.0, 1.0], [6.0, 6.0, 6.0]]] * 2 + [[[0.0] * 3] * 3])
    results = []
    for backend in ("native", "reference"):
        tensors = latest.clone(), history.clone()
        results.append([*roll(*tensors, FP8Products(settings, ALONE, ALONE, backend=backend)), *tensors])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    assert not results[0][2].any() and results[0][0][2, 0] == 1.0


@pytest.mark.parametrize("is_off", [False, True], ids=["aligned", "off"])
@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_amaxes_of_a_list_are_those_of_each_matrix(kernels: str, dtype: torch.dtype, is_off: bool) -> None:
    """Of more matrices than a table holds and more than one part, in float64; casts have the same bits with them."""
    shapes = [(1, 1), (3, 5), (130, 200), (1, 70_000), *[(2, 3)] * 62]
    matrices = [off_16_bytes(matrix(shape, dtype)) if is_off else matrix(shape, dtype) for shape in shapes]
    matrices[1][2, 4] = math.nan
    matrices[4][1, 2] = -math.inf
    parts = amaxes_of_list(matrices)
    assert len(parts[3]) == 5
    for x, amax in zip(matrices, parts, strict=True):
        expected = x.double().abs().amax() if not x.isnan().any() else torch.tensor(math.nan, dtype=torch.float64)
        assert torch.equal(amax.double().amax(), expected) or (expected.isnan() and amax.isnan().any())
    orders = {"rows": WHOLE, "columns": WHOLE}
    for x, amax in zip(matrices[2:5], parts[2:5], strict=True):
        alone = quantise_orders(x, E4M3, orders, backend="native")
        for order, cast in quantise_orders(x, E4M3, orders, backend="native", amax=amax).items():
            for name in ("data", "scale", "inverse"):
                assert torch.equal(bits(getattr(cast, name)), bits(getattr(alone[order], name))), name
