"""Whole weights, gradients and optimizer state of parameters at every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_core
from megatron_core.errors import ConfigError
from megatron_core.training.engine import Engine
from megatron_core.verify.ranks import run_ranks

ROWS: list[dict[str, Any]] = [
    {},
    {"zero_stage": 1, "overlap_grad_reduce": True},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "zero3_keep_after_forward": True, "overlap_param_gather": True},
]


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


def _points() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _engine(**settings: Any) -> Engine:
    config = {"micro_batch_size": 1, "global_batch_size": 4, "lr": 0.1, "clip_grad": 0.0, "weight_decay": 0.0}
    return megatron_core.initialize(_mlp(), {**config, **settings}).engine


def _backward(engine: Engine) -> None:
    """All micro-batches of a step, without the step."""
    rank, accumulation = torch.distributed.get_rank(), engine.gradient_accumulation_steps
    for number in range(accumulation):
        point = _points()[torch.distributed.get_world_size() * number + rank]
        engine.backward(engine(point).square().sum())
        if number < accumulation - 1:
            engine.step()


@pytest.mark.parametrize(("ranks", "row"), [*((2, row) for row in ROWS), (4, ROWS[3])])
def test_reads_and_writes(ranks: int, row: dict[str, Any]) -> None:
    if ranks == 4:
        row = {**row, "num_distributed_optimizer_instances": 2}
    model = _mlp().double()
    (model(_points()).square().sum() / 4).backward()
    for found in run_ranks(ranks, _read_and_write, row):
        for name, parameter in model.named_parameters():
            gradient, weights = found["gradients"][name], parameter.detach()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)
            # The written gradient and moments determine the step: m = 0.1 * 2 + 0.9 * 3, v = 0.001 * 4 + 0.999 * 5.
            update = 0.1 * (2.9 / 0.1) / ((4.999 / 0.001) ** 0.5 + 1e-8)
            if name == "2.weight":
                assert (found["kept"] == 7.0).all()
                weights = torch.full_like(weights, 7.0)
            torch.testing.assert_close(found["weights"][name], weights - update, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(found["second"][name], torch.full_like(weights, 4.999))


def _read_and_write(row: dict[str, Any]) -> dict[str, Any]:
    engine = _engine(fp64=True, adam_beta2=0.999, **row)
    model, whole = engine.module, engine.whole
    with engine.gathered(model[2].parameters(), modify=True, source=1), torch.no_grad():
        assert model[2].weight.norm() > 0
        model[2].weight.fill_(6.0 + torch.distributed.get_rank())
    with engine.gathered(model[2].weight):
        engine(_points()[0])  # a forward inside of a context leaves the weights whole
        kept = model[2].weight.detach().clone()
        with pytest.raises(ConfigError, match="end the context first"):
            engine.step()
    with engine.gathered(model[2].weight, modify=True), torch.no_grad():
        before = model[2].weight.detach().clone()
        model[2].weight.copy_(_mlp()[2].weight)
    _backward(engine)
    gradients = {name: whole.gradient(p).clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        whole.set_gradient(parameter, torch.full_like(gradients[name], 2.0))
        assert (whole.gradient(parameter) == 2.0).all()
        assert whole.state_names(parameter) == ["exp_avg", "exp_avg_sq"]
        whole.set_state(parameter, "exp_avg", torch.full_like(gradients[name], 3.0))
        whole.set_state(parameter, "exp_avg_sq", torch.full_like(gradients[name], 5.0))
    whole.set_weights(model[2].weight, before)
    assert engine.step() is not None
    second = {name: whole.state(p, "exp_avg_sq") for name, p in model.named_parameters()}
    return {"kept": kept, "gradients": gradients, "weights": engine.full_state_dict(), "second": second}


def test_main_weights_keep_their_bits() -> None:
    for row in ({}, {"zero_stage": 3}):
        for before, after, kept in run_ranks(2, _half, row):
            assert (before != before.bfloat16().float()).any()
            assert (after.flatten()[1:] == before.flatten()[1:]).all()
            assert after[0, 0] == kept[0, 0] == 0.5


def _half(row: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    engine = _engine(bf16=True, **row)
    _backward(engine)
    engine.step()
    weight = engine.module[0].weight
    before = engine.whole.weights(weight)
    with engine.gathered(engine.module.parameters(), modify=True), torch.no_grad():
        weight[0, 0] = 0.5
    return before, engine.whole.weights(weight), engine.full_state_dict()["0.weight"]


def test_bad_use() -> None:
    model = _mlp()
    model[0].bias.requires_grad_(False)
    engine = megatron_core.initialize(model, {"global_batch_size": 1}).engine
    with pytest.raises(ConfigError, match=r"the parameter of shape \(5,\) is not trained by this engine"):
        engine.whole.gradient(engine.module[0].bias)
    with pytest.raises(ConfigError, match="optimizer state 'momentum' does not exist; this optimizer has exp_avg"):
        engine.whole.state(engine.module[0].weight, "momentum")
    with pytest.raises(ConfigError, match=r"value of shape \(3,\) must have the shape \(5, 3\)"):
        engine.whole.set_weights(engine.module[0].weight, torch.zeros(3))
    with (
        pytest.raises(ConfigError, match="source=1 must be a data-parallel rank from 0 to 0"),
        engine.gathered([], source=1),
    ):
        pass
