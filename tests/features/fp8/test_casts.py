"""FP8 against formulas written out here: formats bit by bit, scales, blocks, products, and torchao's linear layer."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_core.features.fp8.casts import (
    COLUMNS,
    E4M3,
    E5M2,
    ROWS,
    WHOLE,
    Blocks,
    block_amax,
    cast_to_fp8,
    lost,
    quantise,
    scale_of,
)
from megatron_core.features.fp8.products import FP8Products
from megatron_core.features.fp8.scaled_product import is_scaled_product, product
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.parallel.groups import ALONE
from megatron_core.tensor_parallel.linear import parallel_linear
from tests.defects.plant import planted
from tests.ops.checks import ANY

FORMATS = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}
"""Bits of exponent and mantissa, bias, largest number."""


def _numbers(dtype: torch.dtype) -> list[float]:
    """All non-negative numbers of a format, from their bits."""
    _, mantissa, bias, most = FORMATS[dtype]
    found = []
    for code in range(128):
        exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        if value <= most:
            found.append(value)
    return found


def _nearest(x: float, dtype: torch.dtype) -> float:
    """The nearest number of a format, ties to even; beyond the largest number, the largest."""
    numbers = _numbers(dtype)
    best = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - abs(x)), i % 2))
    return math.copysign(numbers[best], x)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
@ANY
def test_cast_rounds_to_the_nearest_number_and_clamps(dtype: torch.dtype, values: list[float]) -> None:
    one = torch.ones(1, 1)
    for wide in (torch.float32, torch.float64):
        x = torch.tensor(values, dtype=wide).unsqueeze(0)
        assert cast_to_fp8(x, one, dtype, WHOLE).data.float().tolist()[0] == [
            _nearest(value, dtype) for value in values
        ]


def test_overflow_is_clamped_before_the_cast() -> None:
    """e5m2 itself rounds 61,440 and more to infinity."""
    assert cast_to_fp8(torch.tensor([[61440.0, -1e30]]), torch.ones(1, 1), E5M2, WHOLE).data.float().tolist() == [
        [57344.0, -57344.0]
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_not_finite_is_not_clamped_away(dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(4, 256)
    x[1, 3] = bad
    assert quantise(x, dtype).data.float().isnan().any()
    narrow = quantise(x, dtype, Blocks(1, 128)).data.float()
    assert narrow[1, :128].isnan().any() and not narrow[[0, 2, 3]].isnan().any() and not narrow[1, 128:].isnan().any()


@pytest.mark.parametrize("blocks", [WHOLE, ROWS, COLUMNS, Blocks(1, 32), Blocks(32, 1), Blocks(32, 64)])
@pytest.mark.parametrize("shape", [(64, 128), (70, 50), (1, 1), (2, 33, 65), (0, 8)])
def test_amax_and_scale_of_every_block(blocks: Blocks, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64) * 10.0 ** torch.randn(shape, dtype=torch.float64)
    amax, quantised = block_amax(x, blocks), quantise(x, E4M3, blocks)
    assert quantised.data.shape == x.shape and quantised.scale.shape == amax.shape
    height, width = blocks.rows or max(shape[-2], 1), blocks.columns or max(shape[-1], 1)
    for i in range(amax.shape[-2]):
        for j in range(amax.shape[-1]):
            own = (..., slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            if x[own].numel():
                largest = x[own].abs().flatten(-2).amax(-1)
                assert torch.equal(amax[..., i, j], largest)
                expected = (448.0 / largest).float()
                assert torch.equal(quantised.scale[..., i, j], expected)
                scaled = (x[own] * expected[..., None, None].double()).clamp(-448, 448).to(E4M3)
                assert torch.equal(quantised.data[own].float(), scaled.float())
    error = (quantised.dequantised(torch.float64) - x).abs()
    assert (error <= x.abs() * 2.0**-4 + 1e-30 + (x.abs().amax() if x.numel() else 0.0) * 2.0**-9).all()


def test_scales() -> None:
    amax = torch.tensor([448.0, 1.0, 3.0, 0.0, 1e-30, 1e30])
    assert scale_of(amax, E4M3).tolist() == torch.tensor([1.0, 448.0, 448.0 / 3.0, 448e12, 448e12, 448e-30]).tolist()
    assert scale_of(amax[:3], E4M3, margin=2).tolist() == torch.tensor([0.25, 112.0, 112.0 / 3.0]).tolist()
    assert scale_of(amax[:3], E4M3, power_of_two=True).tolist() == [1.0, 256.0, 128.0]
    assert scale_of(torch.tensor([57344.0, 57345.0]), E5M2, power_of_two=True).tolist() == [1.0, 0.5]


def _dequantised_by_hand(x: Tensor, dtype: torch.dtype, blocks: Blocks) -> Tensor:
    """Every element with the amax of its block, one at a time."""
    height, width = blocks.rows or x.shape[0], blocks.columns or x.shape[1]
    result = torch.empty_like(x, dtype=torch.float64)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            top, left = i // height * height, j // width * width
            largest = x[top : top + height, left : left + width].abs().max().double()
            scale = float((torch.finfo(dtype).max / largest).float())
            result[i, j] = _nearest(float((x[i, j].float() * scale).item()), dtype) / scale
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("left", "right", "formats", "is_one_call"),
    [
        (WHOLE, WHOLE, (E4M3, E4M3), True),
        (WHOLE, WHOLE, (E5M2, E4M3), True),
        (ROWS, COLUMNS, (E4M3, E4M3), True),
        (ROWS, WHOLE, (E5M2, E4M3), True),
        (Blocks(1, 8), Blocks(8, 8), (E4M3, E4M3), False),
        (Blocks(1, 8), Blocks(8, 1), (E5M2, E4M3), False),
        (COLUMNS, COLUMNS, (E4M3, E4M3), False),
    ],
)
def test_product_is_that_of_the_dequantised_matrices(
    left: Blocks, right: Blocks, formats: tuple[torch.dtype, torch.dtype], is_one_call: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((17, 24), (24, 11)))
    qa, qb = quantise(a, formats[0], left), quantise(b, formats[1], right)
    assert is_scaled_product(qa, qb, dtype) == (is_one_call and dtype != torch.float64)
    expected = _dequantised_by_hand(a, formats[0], left) @ _dequantised_by_hand(b, formats[1], right)
    bound = {torch.bfloat16: 2.0**-8, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    found = product(qa, qb, dtype)
    assert found.dtype == dtype and (found.double() - expected).abs().max() <= bound * expected.abs().max()
    transposed = product(qb.t(), qa.t(), dtype)
    assert (transposed.double() - expected.t()).abs().max() <= bound * expected.abs().max()


def test_what_is_lost_is_counted() -> None:
    x = torch.tensor([[1000.0, -900.0, 1.0, 1e-4, 0.0, 448.0]])
    assert lost(x, cast_to_fp8(x, torch.ones(1, 1), E4M3, WHOLE)).tolist() == [2.0, 1.0, 5.0]


def _rows_by_hand(x: Tensor, dim: int) -> Tensor:
    """torchao's recipe rowwise: a power of two per row along the summed ``dim``, in bfloat16."""
    amax = x.abs().amax(dim, keepdim=True).double().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(448.0 / amax))).float()
    return (x.float() * scale).clamp(-448, 448).to(E4M3).float() / scale


def _tensor_by_hand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """torchao's recipe tensorwise: one scale, not rounded."""
    scale = (torch.finfo(dtype).max / x.abs().max().double().clamp(min=1e-12)).float()
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype).float() / scale


def linear_case() -> tuple[Tensor, Tensor, Tensor]:
    """x, W and dL/dy in bfloat16, with rows and columns of very different magnitudes (powers of two), which require
    separate scales."""
    generator = torch.Generator().manual_seed(5)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((48, 64), (32, 64), (48, 32)))
    sizes, rows, outputs = (10.0 ** torch.linspace(-3, 3, n) for n in (64, 48, 32))
    x, grad = x * sizes * rows[:, None], grad * outputs.flip(0) * rows.flip(0)[:, None]
    return x.bfloat16(), (weight / sizes * outputs[:, None]).bfloat16(), (grad * 1e-4).bfloat16()


def of_layer(recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, dL/dx and dL/dW of a parallel linear layer in FP8, in torchao's formats of the recipe."""
    x, weight, grad = linear_case()
    fp8 = FP8Products(
        FP8Config(fp8_format="hybrid" if recipe == "tensorwise" else "e4m3", fp8_recipe=recipe), ALONE, ALONE
    )
    x, parameter = x.requires_grad_(), torch.nn.Parameter(weight)
    y = parallel_linear(x, parameter, None, products=fp8)
    y.backward(grad)
    return y.detach(), x.grad, parameter.grad


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linear_layer_by_hand(recipe: str) -> None:
    x, weight, grad = linear_case()
    if recipe == "tensorwise":
        narrow = [_tensor_by_hand(x, E4M3), _tensor_by_hand(weight, E4M3), _tensor_by_hand(grad, E5M2)]
        expected = narrow[0] @ narrow[1].t(), narrow[2] @ narrow[1], narrow[2].t() @ narrow[0]
    else:
        expected = (
            _rows_by_hand(x, 1) @ _rows_by_hand(weight, 1).t(),
            _rows_by_hand(grad, 1) @ _rows_by_hand(weight, 0),
            _rows_by_hand(grad, 0).t() @ _rows_by_hand(x, 0),
        )
    for found, wanted in zip(of_layer(recipe), expected, strict=True):
        assert (found.float() - wanted).abs().max() <= 2.0**-8 * wanted.abs().max()
        assert (found == wanted.bfloat16()).float().mean() > 0.98


@pytest.mark.parametrize(
    ("recipe", "target", "old", "new"),
    [
        (
            "tensorwise",
            "features.fp8.native_casts:cast_orders",
            'data if order == "rows" else data.mT',
            "data.view(x.shape)",
        ),
        ("rowwise", "features.fp8.products:FP8Products.blocks", "ROWS if summed == 1", "ROWS if summed == 0"),
        ("rowwise", "features.fp8.native_casts:cast_orders", "dtype, power_of_two, *grid", "dtype, False, *grid"),
        ("tensorwise", "features.fp8.products:FP8Gradients.of_input", "saved.weight_scales", "saved.input_scales"),
        ("tensorwise", "features.fp8.products:FP8Products.__init__", 'if settings.fp8_format == "hybrid"', "if False"),
    ],
    ids=["transposed form", "rows and columns", "rounding", "stale scale", "format"],
)
def test_casts_that_are_wrong_are_found(recipe: str, target: str, old: str, new: str) -> None:
    with planted(target, old, new), pytest.raises((AssertionError, RuntimeError)):
        test_linear_layer_by_hand(recipe)


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed; see the test by hand"
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_linear_layer_against_torchao(recipe: str) -> None:
    """Its emulated layer, which multiplies dequantised matrices in bfloat16."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    x, weight, grad = linear_case()
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    linear.weight.data.copy_(weight)
    theirs = Float8Linear.from_float(linear, config)
    x.requires_grad_()
    y = theirs(x)
    y.backward(grad)
    for found, wanted in zip(of_layer(recipe), (y, x.grad, theirs.weight.grad), strict=True):
        assert (found - wanted).abs().max() <= 2.0**-7 * wanted.abs().max()
        assert (found == wanted).float().mean() > 0.5
