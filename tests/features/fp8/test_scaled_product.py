"""Blockwise matrix products, which torch has only on GPUs: their operands, and the conditions for their use.

``documented`` computes such a product from the layouts documented by cuBLAS, one scale at a time. Only a GPU can show
the results of torch's kernels; there ``scaled_product_unavailable_reason`` tests them before the first product.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_core.features.fp8 import scaled_product as fp8_product
from megatron_core.features.fp8.casts import COLUMNS, E4M3, E5M2, ROWS, Blocks, Quantised, quantise
from megatron_core.features.fp8.products import FP8Products
from megatron_core.features.fp8.scaled_product import (
    KINDS,
    Operands,
    block_operands,
    block_product,
    dequantised_product,
    is_block_product,
    missing,
    product,
    scaled_product_unavailable_reason,
)
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.parallel.groups import ALONE
from megatron_core.tensor_parallel.linear import parallel_linear

PAIRS = list(KINDS)
CPU = torch.device("cpu")


def case(pair: tuple[Blocks, Blocks], size: tuple[int, int, int] = (160, 640, 384)) -> tuple[Quantised, Quantised]:
    """Two matrices ``[M, K]`` and ``[K, N]`` with blocks of very different magnitudes."""
    generator = torch.Generator().manual_seed(7)
    rows, along, columns = size
    a, b = torch.randn(rows, along, generator=generator), torch.randn(along, columns, generator=generator)
    a *= 10.0 ** torch.randn(rows, along // 32, generator=generator).repeat_interleave(32, 1)
    b *= 10.0 ** torch.randn(along // 32, columns, generator=generator).repeat_interleave(32, 0)
    return tuple(
        quantise(x, dtype, blocks, power_of_two=True)
        for x, dtype, blocks in zip((a, b), (E5M2, E4M3), pair, strict=True)
    )


def widened(data: Tensor, scale: Tensor, kind: str) -> Tensor:
    """``data`` ``[outer, K]`` in float64, each element multiplied by its scale."""
    row, block = torch.arange(len(data), device="cpu")[:, None], torch.arange(data.shape[1] // 32, device="cpu")
    if kind == "BlockWise1x32":
        tile = row // 128 * -(-len(block) // 4) + block // 4
        codes = scale.view(torch.uint8)[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
        factors = 2.0 ** (codes.double() - 127)
    elif kind == "BlockWise1x128":
        factors = scale[row, block // 4].double()
    else:
        factors = scale[block // 4, row // 128].double()
    return data.double() * factors.repeat_interleave(32, 1)


def check_layout(given: Operands) -> None:
    """cuBLAS' requirements of memory layouts: contiguous along the sum, column-major scales, or flat tiles."""
    rows, along, columns = *given.a.shape, given.b.shape[1]
    assert given.a.stride() == (along, 1) and given.b.stride() == (1, along)
    for scale, kind, outer in zip(given[2:4], given.kinds, (rows, columns), strict=True):
        blocks = -(-along // 128)
        if kind == "BlockWise1x32":
            assert scale.dtype == torch.float8_e8m0fnu and scale.is_contiguous()
            assert scale.shape == (-(-outer // 128) * 512 * -(-along // 128),)
            continue
        shape = (outer, blocks) if kind == "BlockWise1x128" else (-(-blocks // 4) * 4, -(-outer // 128))
        assert scale.dtype == torch.float32 and scale.shape == shape
        # A single column may have any stride.
        assert scale.stride() == (1, shape[0]) or (shape[1] == 1 and scale.stride(0) == 1)


def documented(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    left: functional.ScalingType,
    scale_b: Tensor,
    right: functional.ScalingType,
    *,
    swizzle_a: functional.SwizzleType,
    swizzle_b: functional.SwizzleType,
    output_dtype: torch.dtype,
) -> Tensor:
    """``torch.nn.functional.scaled_mm`` for operands in blocks."""
    given = Operands(a, b, scale_a, scale_b, (left.name, right.name))
    check_layout(given)
    is_small = left.name == "BlockWise1x32"
    wanted = functional.SwizzleType.SWIZZLE_32_4_4 if is_small else functional.SwizzleType.NO_SWIZZLE
    assert swizzle_a == swizzle_b == wanted
    return (widened(a, scale_a, left.name) @ widened(b.t(), scale_b, right.name).t()).to(output_dtype)


@pytest.fixture
def blocks_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Pretends that torch supports blockwise products on this machine; records their kinds."""
    kinds = []

    def counted(*given: object, **more: object) -> Tensor:
        kinds.append((given[3].name, given[5].name))
        return documented(*given, **more)

    monkeypatch.setattr(functional, "scaled_mm", counted)
    monkeypatch.setattr(fp8_product, "missing", lambda *_: None)
    scaled_product_unavailable_reason.cache_clear()
    yield kinds
    scaled_product_unavailable_reason.cache_clear()


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("size", [(160, 640, 384), (48, 128, 128)], ids=str)
def test_operands_mean_the_matrices(pair: tuple[Blocks, Blocks], size: tuple[int, int, int]) -> None:
    a, b = case(pair, size)
    given = block_operands(a, b)
    check_layout(given)
    assert torch.equal(widened(given.a, given.scale_a, given.kinds[0]), a.dequantised(torch.float64))
    assert torch.equal(widened(given.b.t(), given.scale_b, given.kinds[1]).t(), b.dequantised(torch.float64))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("size", [(160, 640, 384), (48, 128, 128)], ids=str)
def test_torch_accepts_shapes_and_strides(pair: tuple[Blocks, Blocks], size: tuple[int, int, int]) -> None:
    """torch's checks on the meta device, which run without a GPU."""
    given = block_operands(*case(pair, size))

    def without_memory(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    operands = Operands(*map(without_memory, given[:4]), given.kinds)
    for dtype in (torch.bfloat16, torch.float32):
        found = block_product(operands, dtype)
        assert found.shape == size[::2] and found.dtype == dtype
    with pytest.raises(RuntimeError, match="must have"):
        block_product(operands._replace(scale_b=operands.scale_b[:-1]), torch.bfloat16)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_a_layer_asks_torch_for_its_three_products(recipe: str, blocks_on_cpu: list[tuple[str, str]]) -> None:
    found = _of_layer(recipe)
    small = ("BlockWise1x32", "BlockWise1x32")
    asked = [small] * 3 if recipe == "mxfp8" else [("BlockWise1x128", kind) for kind in ("BlockWise128x128",) * 2]
    checks = sum(pair[0].columns == (32 if recipe == "mxfp8" else 128) for pair in PAIRS)
    assert blocks_on_cpu[checks:] == (asked if recipe == "mxfp8" else [*asked, ("BlockWise1x128", "BlockWise1x128")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_product, "scaled_product_unavailable_reason", lambda *_: "for comparison")
        expected = _of_layer(recipe)
    for own, wanted in zip(found, expected, strict=True):
        assert (own - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_extents_that_torch_does_not_take_are_warned_of(blocks_on_cpu: list[tuple[str, str]]) -> None:
    a, b = case(PAIRS[0], (8, 128, 128))
    with pytest.warns(UserWarning, match="run on dequantised matrices"):
        found = product(a, b, torch.float32)
    assert torch.equal(found, dequantised_product(a, b, torch.float32))


def _of_layer(recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, dL/dx and dL/dW of a linear layer whose 128 tokens, 256 inputs and 128 outputs consist of blocks."""
    generator = torch.Generator().manual_seed(5)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((128, 256), (128, 256), (128, 128)))
    x, parameter = (x * 10.0 ** torch.linspace(-2, 2, 256)).requires_grad_(), nn.Parameter(weight)
    fp8 = FP8Products(FP8Config(fp8_format="hybrid", fp8_recipe=recipe), ALONE, ALONE)
    y = parallel_linear(x, parameter, None, products=fp8)
    y.backward(grad)
    return y.detach(), x.grad, parameter.grad


def _without_padding(given: Operands) -> Operands:
    """As in torch before pull request 166752: scales of 128 x 128 blocks are K / 128 apart instead of a multiple of
    4."""
    if given.kinds[1] != "BlockWise128x128":
        return given
    dense = given.scale_b[: -(-given.a.shape[1] // 128)].t().flatten()
    padded, columns = given.scale_b.shape
    wrong = functional.pad(dense, (0, padded * columns - len(dense))).view(columns, padded).t()
    return given._replace(scale_b=wrong)


def _rows_of_a_tile_in_order(given: Operands) -> Operands:
    """Scales of 128 x 4 blocks without the tiled order."""
    if given.kinds[0] != "BlockWise1x32":
        return given
    tiles = given.scale_a.view(torch.uint8).view(-1, 32, 4, 4).transpose(1, 2)
    return given._replace(scale_a=tiles.flatten().view(torch.float8_e8m0fnu))


@pytest.mark.parametrize(("defect", "block"), [(_without_padding, 128), (_rows_of_a_tile_in_order, 32)])
def test_a_wrong_product_is_found_before_it_is_used(
    defect: object, block: int, blocks_on_cpu: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_product, "block_operands", lambda a, b: defect(block_operands(a, b)))
    assert "is off by" in scaled_product_unavailable_reason(block, CPU)
    assert scaled_product_unavailable_reason(160 - block, CPU) is None
    a, b = case(next(pair for pair in PAIRS if pair[0].columns == block))
    assert torch.equal(product(a, b, torch.float32), dequantised_product(a, b, torch.float32))


def test_where_new_tensors_lie_does_not_matter(blocks_on_cpu: list[tuple[str, str]]) -> None:
    with torch.device("meta"):
        assert [scaled_product_unavailable_reason(block, CPU) for block in (128, 32)] == [None, None]


def test_a_product_that_fails_is_not_used(
    blocks_on_cpu: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*given: object, **more: object) -> Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhere that was")

    monkeypatch.setattr(functional, "scaled_mm", failing)
    assert scaled_product_unavailable_reason(128, CPU) == "torch's product fails here: CUBLAS_STATUS_NOT_SUPPORTED"


@pytest.mark.parametrize(
    ("block", "capability", "cuda", "version", "found"),
    [
        (128, (9, 0), "12.9", "2.10.0", None),
        (128, (9, 0), "13.0", "2.13.0+cu130", None),
        (32, (10, 0), "12.8", "2.10.0", None),
        (32, (12, 0), "13.0", "2.13.0", None),
        (128, None, None, "2.13.0+cpu", "only on NVIDIA GPUs"),
        (128, (9, 4), None, "2.13.0+rocm7.0", "only on NVIDIA GPUs"),
        (128, (9, 0), "12.9", "2.9.1", "use 2.10 or later"),
        (128, (9, 0), "12.8", "2.13.0", "needs 12.9"),
        (128, (10, 0), "13.0", "2.13.0", "compute capability 9.0 alone, and this GPU's is 10.0"),
        (32, (9, 0), "13.0", "2.13.0", "compute capability 10.0 and later, and this GPU's is 9.0"),
        (32, (10, 0), "12.6", "2.13.0", "needs 12.8"),
        (None, None, None, "2.13.0+cpu", None),
        (None, None, None, "2.12.1+cpu", "torch 2.12.1+cpu does not have it on a CPU"),
        (None, (8, 9), "12.4", "2.8.0", None),
        (None, (8, 0), "12.4", "2.8.0", "compute capability 8.9 and later, and this GPU's is 8.0"),
    ],
)
def test_what_a_device_needs(
    block: int | None, capability: tuple[int, int] | None, cuda: str | None, version: str, found: str | None
) -> None:
    reason = missing(block, capability, cuda, version)
    assert reason == found if found is None else found in reason


@pytest.mark.parametrize(
    ("pair", "size", "dtype", "fits"),
    [
        (PAIRS[0], (16, 128, 128), torch.bfloat16, True),
        (PAIRS[0], (8, 128, 128), torch.bfloat16, False),
        (PAIRS[0], (16, 192, 128), torch.bfloat16, False),
        (PAIRS[0], (16, 128, 160), torch.bfloat16, False),
        (PAIRS[1], (16, 128, 160), torch.float32, True),
        (PAIRS[1], (16, 128, 160), torch.float64, False),
        (PAIRS[2], (5, 96, 48), torch.bfloat16, True),
        (PAIRS[2], (5, 96, 40), torch.bfloat16, False),
        ((ROWS, COLUMNS), (16, 128, 128), torch.bfloat16, False),
        ((Blocks(128, 128), Blocks(128, 1)), (128, 128, 128), torch.bfloat16, False),
    ],
    ids=str,
)
def test_what_a_product_takes(
    pair: tuple[Blocks, Blocks], size: tuple[int, int, int], dtype: torch.dtype, fits: bool
) -> None:
    a, b = case(pair, size)
    assert is_block_product(a, b, dtype) == fits
    narrow = quantise(torch.ones(size[1], size[2]), E5M2, pair[1])
    assert not is_block_product(a, narrow, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("block", [128, 32])
def test_this_gpu_has_what_its_kind_has(block: int) -> None:
    """No product that torch should support here fails or is inaccurate."""
    device = torch.device("cuda", torch.cuda.current_device())
    expected = missing(block, torch.cuda.get_device_capability(device), torch.version.cuda, torch.__version__)
    assert scaled_product_unavailable_reason(block, device) == expected
