"""FP8 of models that a ``TransformerConfig`` describes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training.arguments import core_transformer_config_from_args, parse_args
from megatron_core import parallel_state
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.test_gpt_model import IDS, config, gpt

E4M3_MAX = 448.0


def rounded(x: Tensor, amax: Tensor) -> Tensor:
    """``x`` quantized to e4m3 with scale 448 / amax."""
    scale = E4M3_MAX / amax.float()
    return (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() / scale


def seen(layer: Any) -> list[tuple[Tensor, Tensor]]:
    """A list to which every forward pass of the layer appends its input and output."""
    found: list[tuple[Tensor, Tensor]] = []
    layer.register_forward_hook(lambda _, inputs, output: found.append((inputs[0].detach(), output[0].detach())))
    return found


def test_products_are_those_of_rounded_matrices() -> None:
    model = gpt(config(bf16=True, params_dtype=torch.bfloat16, fp8="hybrid", fp8_recipe="tensorwise"))
    layer = model.decoder.layers[1].mlp.linear_fc1
    found = seen(layer)
    model(IDS, labels=IDS).sum().backward()
    (x, y), weight = found[0], layer.weight.detach()
    expected = rounded(x, x.abs().max()) @ rounded(weight, weight.abs().max()).T
    torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=2e-3)
    exact = x.float() @ weight.float().T
    assert (y.float() - exact).norm() > 4 * (y.float() - expected).norm()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def delayed() -> list[float]:
    """The error of the second step's product against the one with the scale of the first step on all ranks, of the
    first step on this rank, and of the second step."""
    parallel_state.initialize_model_parallel()
    settings = config(bf16=True, params_dtype=torch.bfloat16, fp8="e4m3")
    model = DistributedDataParallel(settings, DistributedDataParallelConfig(), gpt(settings))
    layer, rank = model.module.decoder.layers[0].mlp.linear_fc1, parallel_state.get_data_parallel_rank()
    found = seen(layer)
    for ids in (IDS + rank, IDS // 2):
        model(ids, labels=IDS).sum().backward()
        model.finish_grad_sync()
    weight, (x, y) = layer.weight.detach(), found[1]
    own = [each.abs().max().float() for each, _ in found]
    everyone = own[0].clone()
    if parallel_state.get_data_parallel_world_size() > 1:
        torch.distributed.all_reduce(everyone, torch.distributed.ReduceOp.MAX)
    narrow = rounded(weight, weight.abs().max()).T
    return [float((y.float() - rounded(x, amax) @ narrow).norm()) for amax in (everyone, *own)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_delayed_scales_are_those_of_the_step_before_on_all_ranks(ranks: int) -> None:
    found = run_ranks(ranks, delayed)
    assert all(3 * expected < latest for expected, _, latest in found), found
    assert ranks == 1 or any(3 * expected < alone for expected, alone, _ in found), found


def test_layers_at_the_ends_stay_out() -> None:
    model = gpt(config(num_layers=3, bf16=True, params_dtype=torch.bfloat16, fp8="hybrid", first_last_layers_bf16=True))
    assert [layer.mlp.linear_fc1.product is not parallel_linear for layer in model.decoder.layers] == [
        False,
        True,
        False,
    ]


def test_a_programs_flags_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --bf16 --fp8-format hybrid --fp8-recipe delayed"
    monkeypatch.setattr(sys, "argv", ["program.py", *flags.split(), "--fp8-margin", "1"])
    args = parse_args()
    settings = core_transformer_config_from_args(args)
    found = args.fp8, settings.fp8, settings.fp8_recipe, settings.fp8_margin
    assert found == ("hybrid", "hybrid", "delayed", 1)
    assert get_gpt_layer_local_spec(fp8=args.fp8) == get_gpt_layer_local_spec()
