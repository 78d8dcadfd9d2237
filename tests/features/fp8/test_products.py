"""Communication of linear layers in FP8, and their use of scales of whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_core.features.fp8 import products as fp8_products
from megatron_core.features.fp8.arithmetic import FP8LayerArithmetic
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.parallel.groups import ALONE
from megatron_core.tensor_parallel import (
    ColumnParallelLinear,
    ModelParallelConfig,
    RowParallelLinear,
    linear,
    linear_comm,
)
from megatron_core.tensor_parallel.arithmetic import PLAIN
from megatron_core.verify.ranks import run_ranks

S, B, IN, OUT = 8, 2, 32, 16


def _gathered(recipe: str | None, wgrad: bool) -> list[tuple[torch.dtype, int]]:
    """Data type and elements of each gather along the sequence, of one forward and backward."""
    seen = []
    start = linear.start_gather_sequence

    def counted(x, group):
        seen.append((x.dtype, x.numel()))
        return start(x, group)

    for module in (linear, linear_comm, fp8_products):  # in a forked rank
        module.start_gather_sequence = counted
    settings = FP8Config(fp8_format="hybrid", fp8_recipe=recipe or "delayed", fp8_wgrad=wgrad)
    arithmetic = FP8LayerArithmetic(settings) if recipe else PLAIN
    config = ModelParallelConfig(sequence_parallel=True, params_dtype=torch.bfloat16, arithmetic=arithmetic)
    layer = ColumnParallelLinear(IN, OUT, config=config, tp_group=dist.group.WORLD)
    x = torch.randn(S // 2, B, IN, dtype=torch.bfloat16, requires_grad=True)
    layer(x)[0].float().sum().backward()
    return seen


@pytest.mark.parametrize(
    ("recipe", "wgrad", "dtypes"),
    [
        (None, True, [torch.bfloat16, torch.bfloat16]),
        ("tensorwise", True, [torch.uint8, torch.uint8]),
        ("delayed", True, [torch.uint8, torch.uint8]),
        ("tensorwise", False, [torch.uint8, torch.bfloat16]),
        ("rowwise", True, [torch.bfloat16, torch.bfloat16]),
    ],
)
def test_sequences_are_gathered_in_fp8(recipe: str | None, wgrad: bool, dtypes: list[torch.dtype]) -> None:
    """If one scale applies to the whole tensor: half the bytes of bfloat16, forward and backward."""
    for seen in run_ranks(2, _gathered, recipe, wgrad):
        assert seen == [(dtype, S // 2 * B * IN) for dtype in dtypes]


def _outputs(recipe: str) -> None:
    """Both kinds of layers on two ranks and on one: outputs of a column-parallel one are bitwise equal."""
    settings = FP8Config(fp8_format="e4m3", fp8_recipe=recipe)
    config = ModelParallelConfig(params_dtype=torch.bfloat16, arithmetic=FP8LayerArithmetic(settings))
    x, full = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((S, B, 256), (512, 256)))
    x *= 10.0 ** torch.linspace(-2, 2, 256)

    def column(group):
        layer = ColumnParallelLinear(
            256, 512, bias=False, config=config, tp_group=group, init_method=lambda w: w.copy_(full)
        )
        return layer(x.bfloat16())[0]

    def row(group):
        layer = RowParallelLinear(
            256,
            512,
            bias=False,
            config=config,
            tp_group=group,
            input_is_parallel=False,
            init_method=lambda w: w.copy_(full),
        )
        return layer(x.bfloat16())[0]

    world, alone = dist.group.WORLD, fp8_products.ALONE
    assert torch.equal(column(world), column(alone).chunk(2, -1)[dist.get_rank()])
    expected = row(alone).float()
    assert (row(world).float() - expected).abs().max() <= 2.0**-7 * expected.abs().max()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_layer_over_two_ranks(recipe: str) -> None:
    run_ranks(2, _outputs, recipe)


def _rounded(x: torch.Tensor, blocks: tuple[int, ...], *, power_of_two: bool = False) -> torch.Tensor:
    """The definition: x in e4m3 with a scale of 448 / amax per block, and back, in float64."""
    sizes = [size for extent, block in zip(x.shape, blocks, strict=True) for size in (extent // block, block)]
    inside = tuple(range(1, 2 * x.dim(), 2))
    blocked = x.double().view(sizes)
    scale = 448.0 / blocked.abs().amax(inside, keepdim=True)
    if power_of_two:
        scale = 2.0 ** scale.log2().floor()
    return ((blocked * scale).to(torch.float8_e4m3fn).double() / scale).view(x.shape)


def _massive_tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations ``[sequence, token, I]`` as in trained models: the first token of a sequence has one element about
    200 times the others; and a weight ``[O, I]``."""
    draw = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(8, 16, 128, generator=draw), torch.randn(128, 128, generator=draw)
    x[:, 0, 7] = 200 * (1 + 0.2 * torch.randn(8, generator=draw))
    return x.bfloat16().float(), weight.bfloat16().float()


def test_recipes_are_their_definition_on_massive_activations() -> None:
    """Each output is the product of matrices rounded by the definition; two rules cost accuracy.

    448 / amax represents the largest element exactly, a power of two does not; and the scale of a micro-batch
    represents the largest element of only one sequence exactly.
    """
    squares: dict[str, float] = dict.fromkeys(("whole", "sequences", "rows", "rows, exact"), 0.0)
    for seed in range(6):
        x, weight = _massive_tokens(seed)
        tokens, features = x.shape[1:]
        baseline = x.double() @ weight.double().T
        of_weight = _rounded(weight, weight.shape)
        by_row = _rounded(x, (1, 1, features), power_of_two=True), _rounded(weight, (1, 128), power_of_two=True)
        along = [(_rounded(x, (1, 1, n), power_of_two=True), n) for n in (128, 32)]
        defined = {
            "tensorwise": _rounded(x, x.shape) @ of_weight.T,
            "rowwise": by_row[0] @ by_row[1].T,
            "blockwise": along[0][0] @ _rounded(weight, (128, 128), power_of_two=True).T,
            "mxfp8": along[1][0] @ _rounded(weight, (1, 32), power_of_two=True).T,
        }
        for recipe, expected in defined.items():
            products = fp8_products.FP8Products(FP8Config(fp8_format="e4m3", fp8_recipe=recipe), ALONE, ALONE)
            found, *_ = products.output(x, weight, None, linear_comm.NO_COMM, training=False)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())
        others = {
            "whole": defined["tensorwise"],
            "sequences": _rounded(x, (1, tokens, features)) @ of_weight.T,
            "rows": defined["rowwise"],
            "rows, exact": _rounded(x, (1, 1, features)) @ _rounded(weight, (1, 128)).T,
        }
        for name, y in others.items():
            squares[name] += ((y - baseline).square().sum() / baseline.square().sum()).item()
    assert 1.3 < squares["whole"] / squares["sequences"] < 2.2
    assert 1.6 < squares["rows"] / squares["rows, exact"] < 2.6
