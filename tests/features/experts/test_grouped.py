"""Grouped products against the definition in float64: on the CPU by loops, on a simulated GPU by torch's products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatron_core.features.experts.grouped import accumulate_grouped_weight_grad_, grouped_product, grouped_weight_grad
from megatron_core.features.experts.grouped_linear import grouped_linear
from megatron_core.features.fp8.casts import E4M3, E5M2
from megatron_core.features.fp8.experts import FP8ExpertProducts
from megatron_core.features.fp8.grouped_product import grouped_unavailable_reason
from megatron_core.features.fp8.products import FP8Products
from megatron_core.features.fp8.scaled_product import scaled_product_unavailable_reason
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.parallel.groups import ALONE
from tests.defects.plant import planted
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.runtime import simulated_gpu

EVEN, RAGGED, SKEWED = [24, 24, 24, 24], [30, 0, 41, 25], [96, 0, 0, 0]
INNER, OUTER = 48, 32
BF16 = torch.bfloat16
BATCHED, GROUPED, SCALED = "aten.baddbmm.dtype_out", "aten._grouped_mm.default", "aten._scaled_grouped_mm.default"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Relative to the largest element: one rounding of a result, and in float32 and float64 sums of up to 96 products.
BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def draw(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows ``[R, I]``, matrices ``[E, O, I]`` and gradients of outputs ``[R, O]``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (96, INNER), (4, OUTER, INNER), (96, OUTER)
    x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, grad


def of_group(x: Tensor, counts: list[int]) -> list[Tensor]:
    return list(x.double().split(counts))


def weight_grads(x: Tensor, grad: Tensor, counts: list[int]) -> Tensor:
    """The definition of weight gradients."""
    return torch.stack([g.t() @ own for g, own in zip(of_group(grad, counts), of_group(x, counts), strict=True)])


def close(found: Tensor, expected: Tensor, bound: float) -> bool:
    return bool((found.double() - expected).abs().max() <= bound * expected.abs().max())


def results(device: str, dtype: torch.dtype, counts: list[int]) -> list[Tensor]:
    """Outputs, input gradients, weight gradients, and a sum of weight gradients with what was there."""
    x, weight, grad = (each.to(device) for each in draw(dtype))
    total = torch.ones(4, OUTER, INNER, dtype=torch.promote_types(dtype, torch.float32)).to(device)
    accumulate_grouped_weight_grad_(total, grad, x, counts)
    found = [
        grouped_product(x, weight.transpose(1, 2), counts),
        grouped_product(grad, weight, counts),
        grouped_weight_grad(grad, x, counts),
        total,
    ]
    return [each.cpu() for each in found]


def check(found: list[Tensor], dtype: torch.dtype, counts: list[int]) -> None:
    x, weight, grad = draw(dtype)
    matrices = weight.double().unbind()
    outputs = torch.cat([own @ matrix.t() for own, matrix in zip(of_group(x, counts), matrices, strict=True)])
    inputs = torch.cat([own @ matrix for own, matrix in zip(of_group(grad, counts), matrices, strict=True)])
    of_weight = weight_grads(x, grad, counts)
    for own, expected in zip(found[:3], (outputs, inputs, of_weight), strict=True):
        assert own.dtype == dtype and close(own, expected, BOUNDS[dtype])
    wide = torch.promote_types(dtype, torch.float32)
    assert found[3].dtype == wide and close(found[3], of_weight + 1.0, BOUNDS[wide]), "not rounded to 16 bits"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [EVEN, RAGGED, SKEWED], ids=str)
def test_on_a_cpu(dtype: torch.dtype, counts: list[int]) -> None:
    check(results("cpu", dtype, counts), dtype, counts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [EVEN, RAGGED, SKEWED], ids=str)
def test_on_a_gpu(dtype: torch.dtype, counts: list[int]) -> None:
    narrow = dtype.itemsize == 2
    with simulated_gpu():
        found, calls = results("cuda", dtype, counts), dict(LOG.calls)
    check(found, dtype, counts)
    assert calls.get(BATCHED, 0) == (narrow and counts != SKEWED), "groups of very different sizes are not padded"
    assert calls.get(GROUPED, 0) == (3 if dtype != torch.float64 else 0)
    assert not any(line.startswith("megatron_core") for line in LOG.stalls), "the host does not wait"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("counts", [EVEN, RAGGED, SKEWED], ids=str)
def test_on_this_gpu(counts: list[int]) -> None:
    check(results("cuda", torch.bfloat16, counts), torch.bfloat16, counts)


@pytest.mark.parametrize(
    ("place", "old", "new"),
    [
        ("features.experts.grouped:_padded", "number * longest - run.start", "number * longest"),
        ("features.experts.grouped:_padded", "right=True", "right=False"),
        ("features.experts.grouped:grouped_weight_grad", "total[group].zero_()", "pass"),
        (
            "features.experts.grouped:grouped_product",
            "ends_of(counts, x.device)",
            "ends_of([0, *counts[:-1]], x.device)",
        ),
    ],
    ids=["places", "boundaries", "no rows", "ends"],
)
def test_finds_defects(place: str, old: str, new: str) -> None:
    with planted(place, old, new), simulated_gpu(), pytest.raises((AssertionError, RuntimeError, IndexError)):
        check(results("cuda", torch.bfloat16, RAGGED), torch.bfloat16, RAGGED)


# FP8.

HISTORY = (64.0, 2.0, 8.0)
"""Amaxes of inputs, weights and gradients in an earlier step; some elements are now larger, and clamped."""


@contextmanager
def fp8_gpu() -> Iterator[None]:
    """A simulated GPU on which torch was built with CUDA."""
    caches = grouped_unavailable_reason, scaled_product_unavailable_reason
    for cached in caches:
        cached.cache_clear()
    with pytest.MonkeyPatch.context() as patch, simulated_gpu():
        patch.setattr(torch.version, "cuda", "13.0")
        yield
    for cached in caches:
        cached.cache_clear()


def rounded(x: Tensor, blocks: tuple[int | None, ...], largest: float, *, power_of_two: bool) -> Tensor:
    """The definition: ``x`` in e4m3 or e5m2 with a scale of ``largest`` / amax for each block, and back, in float64."""
    if not x.numel():
        return x.double()
    widths = [size or extent for extent, size in zip(x.shape, blocks, strict=True)]
    extents = [-(-extent // width) * width for extent, width in zip(x.shape, widths, strict=True)]
    sizes = [part for whole, width in zip(extents, widths, strict=True) for part in (whole // width, width)]
    padding = [part for extent, whole in zip(x.shape, extents, strict=True) for part in (whole - extent, 0)][::-1]
    blocked = nn.functional.pad(x.double(), padding).view(sizes)
    amax = blocked.abs().amax(tuple(range(1, 2 * x.dim(), 2)), keepdim=True).clamp_min(1e-12)
    scale = (largest / amax).float().double() if not power_of_two else 2.0 ** (largest / amax).log2().floor()
    back = (blocked * scale).float().to(E4M3 if largest == 448.0 else E5M2).double() / scale
    return back.view(extents)[tuple(slice(extent) for extent in x.shape)]


def clamped(x: Tensor, amax: float, largest: float) -> Tensor:
    """The definition with a scale for an earlier amax."""
    scale = largest / amax
    scaled = (x.double() * scale).clamp(-largest, largest).float()
    return scaled.to(E4M3 if largest == 448.0 else E5M2).double() / scale


def defined(recipe: str, x: Tensor, weight: Tensor, grad: Tensor, counts: list[int]) -> list[Tensor]:
    """Outputs, input gradients and weight gradients of experts in FP8 by the definition, with gradients in e5m2.

    With tensorwise each row has its own scale, and each expert's matrix has one scale. Only with delayed are weight
    gradients in FP8.
    """
    if recipe == "delayed":
        x, weight, grad = (
            clamped(each, amax, largest)
            for each, amax, largest in zip((x, weight, grad), HISTORY, (448.0, 448.0, 57344.0), strict=True)
        )
        parts = zip(of_group(x, counts), of_group(grad, counts), weight, strict=True)
        products = [(own @ matrix.t(), of_output @ matrix) for own, of_output, matrix in parts]
        return [*map(torch.cat, zip(*products, strict=True)), weight_grads(x, grad, counts)]
    power, size = recipe != "tensorwise", {"blockwise": 128, "mxfp8": 32}.get(recipe)

    def rows(each: Tensor, largest: float) -> Tensor:
        return rounded(each, (1, size), largest, power_of_two=power)

    square = {"tensorwise": (1, None, None), "blockwise": (1, 128, 128)}.get(recipe)
    forward = rounded(weight, square or (1, 1, size), 448.0, power_of_two=power)
    backward = rounded(weight, square or (1, size, 1), 448.0, power_of_two=power)
    parts = list(zip(of_group(rows(x, 448.0), counts), of_group(rows(grad, 57344.0), counts), strict=True))
    outputs = torch.cat([own @ matrix.t() for (own, _), matrix in zip(parts, forward, strict=True)])
    inputs = torch.cat([own @ matrix for (_, own), matrix in zip(parts, backward, strict=True)])
    return [outputs, inputs, weight_grads(x, grad, counts)]


def experts(
    recipe: str, device: str, counts: list[int], fp8_format: str = "hybrid", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The same by ``grouped_linear``."""
    x, weight, grad = (each.to(device) for each in wide_draw(dtype))
    x, parameter = x.requires_grad_(), nn.Parameter(weight)
    settings = FP8Config(fp8_format=fp8_format, fp8_recipe=recipe)
    fp8 = FP8Products(settings, ALONE, ALONE, by_row=True, backend="reference" if device == "cuda" else "auto")
    if recipe == "delayed":
        fp8.history = torch.tensor([HISTORY]).to(device)
    y = grouped_linear(x, parameter, counts, products=FP8ExpertProducts(fp8))
    torch.autograd.backward([get_gradient_edge(y)], [grad])  # as the executor does
    return [each.detach().cpu() for each in (y, x.grad, parameter.grad)]


def wide_draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Factors with extents of whole blocks and rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(3)
    shapes = (96, 256), (4, 128, 256), (96, 128)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    x *= 10.0 ** torch.randn(96, 1, generator=generator)
    return x.to(dtype), weight.to(dtype), grad.to(dtype)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"])
def test_experts_in_fp8_are_their_definition(recipe: str) -> None:
    found = experts(recipe, "cpu", RAGGED)
    expected = defined(recipe, *wide_draw(), RAGGED)
    for own, wanted in zip(found, expected, strict=True):
        assert close(own, wanted, 2e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
@pytest.mark.parametrize("counts", [EVEN, RAGGED], ids=str)
def test_experts_in_fp8_on_a_gpu(recipe: str, counts: list[int]) -> None:
    """One product of torch for all experts; gradients in e5m2, which its kernel does not take, are multiplied alone."""
    with fp8_gpu():
        found, own = experts(recipe, "cuda", counts, dtype=BF16), LOG.calls[SCALED]
        alone = sum(count > 0 for count in counts) * (2 if recipe == "delayed" else 1)
        assert LOG.calls["aten._scaled_mm.default"] == alone, "input gradients in e5m2, and weight gradients in FP8"
        experts(recipe, "cuda", counts, "e4m3", BF16)
        again = LOG.calls[SCALED]
    assert own == 3 + 1, "the comparison with the definition, and forward"
    assert again == own + 2, "forward and input gradients"
    for each, wanted in zip(found, defined(recipe, *wide_draw(BF16), counts), strict=True):
        assert close(each, wanted, 2**-8), "torch's grouped product returns bfloat16"


@pytest.mark.filterwarnings("ignore:FP8 products that torch does not support")
@pytest.mark.parametrize(
    ("recipe", "dtype", "bound"), [("rowwise", torch.float16, 2**-11), ("delayed", torch.float32, 2e-6)]
)
def test_experts_are_not_rounded_to_bfloat16_first(recipe: str, dtype: torch.dtype, bound: float) -> None:
    with fp8_gpu():
        before = LOG.calls[SCALED]
        outputs, *_ = experts(recipe, "cuda", RAGGED, dtype=dtype)
        assert LOG.calls[SCALED] == before
    assert close(outputs, defined(recipe, *wide_draw(dtype), RAGGED)[0], bound)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("scale_a = rows.inverse", "scale_a = rows.scale", "is off by"),
        ("matrices.data.mT.contiguous().mT", "matrices.data.contiguous()", "fails here: Expected mat_b"),
        ("matrices.inverse", "matrices.inverse[:1]", "is off by"),
    ],
    ids=["scales", "order", "one scale"],
)
def test_a_wrong_product_is_not_used(old: str, new: str, found: str) -> None:
    with fp8_gpu(), planted("features.fp8.grouped_product:_scaled_grouped_mm", old, new):
        with pytest.warns(UserWarning, match=f"multiplied one by one: torch's grouped product.* {found}"):
            experts("rowwise", "cuda", RAGGED, dtype=BF16)
        before = LOG.calls[SCALED]
        results = experts("rowwise", "cuda", RAGGED, dtype=BF16)
        assert LOG.calls[SCALED] == before
    for each, wanted in zip(results, defined("rowwise", *wide_draw(BF16), RAGGED), strict=True):
        assert close(each, wanted, 2**-8)


def test_only_some_gpus_have_it() -> None:
    with fp8_gpu(), pytest.MonkeyPatch.context() as patch:
        assert "only on NVIDIA GPUs" in str(grouped_unavailable_reason(torch.device("cpu")))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
        reason = grouped_unavailable_reason(torch.device("cuda", 0))
    assert "compute capability 9.0, and this GPU's is 10.0" in str(reason)
