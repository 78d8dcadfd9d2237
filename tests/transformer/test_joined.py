"""Parts with the same input, whose outputs are added, have one reduction over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_core.config import ModelConfig, RunConfig
from megatron_core.parallel import Grid, ParallelGroups
from megatron_core.planner.parameters import joins_parts
from megatron_core.reports.meter import METER
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SequenceContext
from megatron_core.transformer.block import TransformerLayer
from megatron_core.transformer.joined import separate_parts
from megatron_core.transformer.layer_spec import layer_spec
from megatron_core.verify.ranks import run_ranks, this_world

SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4}
SIZES |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODELS = {
    "attention and MLP": {"parallel_residual": True, "parallel_residual_shared_norm": True},
    "attention and Mamba-2": {
        "hybrid_layer_pattern": "H",
        "mamba_state_dim": 4,
        "mamba_head_dim": 4,
        "mamba_num_groups": 2,
        "parallel_mixer_multipliers": (0.7, 1.2),
    },
}
LAYOUTS = {
    "tp2": (False, {"forward": {"all_reduce": 1}, "backward": {"all_reduce": 1}}),
    "tp2 sp": (
        True,
        {
            "forward": {"all_gather": 2, "reduce_scatter": 1},
            "backward": {"all_gather": 3, "reduce_scatter": 1},  # of the output's gradient, and of each part's input
        },
    ),
}


def _run(
    model: dict[str, Any], sequence_parallel: bool, joined: bool
) -> tuple[dict[str, dict[str, int]], list[Tensor]]:
    """The collectives over the tensor-parallel ranks in each direction; output and all gradients."""
    groups = ParallelGroups(Grid(tp=2), this_world().rank)
    parallel = ModelParallelConfig(sequence_parallel=sequence_parallel, params_dtype=torch.float64)
    config, tp = ModelConfig(**SIZES, **model), groups.group("tp")
    torch.manual_seed(this_world().rank)
    layer = TransformerLayer(LayerContext(config, parallel, tp, 1, groups), 0, layer_spec(config, 0))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if not joined:
        separate_parts([layer])
    own = torch.Generator().manual_seed(5 + sequence_parallel * this_world().rank)
    x = torch.randn(4 if sequence_parallel else 8, 2, 16, dtype=torch.float64, generator=own).requires_grad_()
    METER.start(groups, torch.device("cpu"))
    y = layer(x, SequenceContext())
    forward = METER.take().traffic
    (y * torch.randn(y.shape, dtype=y.dtype, generator=own)).sum().backward()
    backward = METER.take().traffic
    METER.stop()
    counts = {
        name: {key.split()[1]: each.calls for key, each in traffic.items() if key.startswith("tp ")}
        for name, traffic in (("forward", forward), ("backward", backward))
    }
    return counts, [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]


def _compare(model: dict[str, Any], sequence_parallel: bool) -> tuple[Any, Any]:
    (once, found), (twice, expected) = (_run(model, sequence_parallel, joined) for joined in (True, False))
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
    return once, twice


@pytest.mark.every_case
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_two_parts_have_one_reduction(name: str, layout: str) -> None:
    sequence_parallel, wanted = LAYOUTS[layout]
    for once, twice in run_ranks(2, _compare, MODELS[name], sequence_parallel):
        assert once == wanted
        reductions = {kind: twice[kind].get("all_reduce", twice[kind].get("reduce_scatter")) for kind in twice}
        assert reductions == {"forward": 2, "backward": 2}


@pytest.mark.parametrize("settings", [{"hidden_dropout": 0.1}, {"parallel_residual_shared_norm": False}])
def test_outputs_that_are_needed_alone_are_not_joined(settings: dict[str, Any]) -> None:
    """The planner's rule says the same."""
    for given, expected in ((settings, False), ({}, True)):
        assert run_ranks(2, _is_joined, given) == [expected] * 2
        flat = SIZES | MODELS["attention and MLP"] | given | {"tensor_model_parallel_size": 2}
        assert joins_parts(RunConfig.from_flat(flat), 0) is expected


def _is_joined(settings: dict[str, Any]) -> bool:
    groups = ParallelGroups(Grid(tp=2), this_world().rank)
    config = ModelConfig(**SIZES | MODELS["attention and MLP"] | settings)
    context = LayerContext(config, ModelParallelConfig(), groups.group("tp"), 1, groups)
    return TransformerLayer(context, 0, layer_spec(config, 0)).joined is not None
