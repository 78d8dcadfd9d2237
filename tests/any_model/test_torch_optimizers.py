"""Optimizers of torch and of the caller on shards, against their own steps in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import NAdam, RMSprop

import megatron_core
from megatron_core.any_model.torch_optimizer import coupling_of
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

STEPS, BATCH, CLIP = 4, 4, 0.2
Make = Callable[..., torch.optim.Optimizer]


class Trust(torch.optim.Optimizer):
    """Gradient descent with LAMB's ratio of norms, and a counter in its groups."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """w = w - lr / sqrt(count) |w| / |g| g."""
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                ratio = p.norm() / (p.grad.norm() + 1e-6)
                p.sub_(group["lr"] / group["count"] ** 0.5 * ratio * p.grad)


class Joint(Trust):
    """All parameters share one norm."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """w = w - lr / |all g| g."""
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(1e-2 / norm * p.grad)


adafactor = partial(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1)
MAKERS: dict[str, Make] = {
    "rmsprop": partial(RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "nadam": partial(NAdam, lr=1e-2, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.3),
    "nesterov": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "adafactor": adafactor,
    "trust": Trust,
    "joint": Joint,
}
COUPLING = {"adafactor": "parameter", "trust": "parameter", "joint": "model"}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


def _points(step: int) -> Tensor:
    return torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _alone(make: Make) -> dict[str, Tensor]:
    model = _model().double()
    optimizer = make(_groups(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_points(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters()), "lr": 3e-2}, {"params": list(model[2:].parameters())}]


def _train(name: str, settings: dict[str, Any], folder: str = "", first: int = 0, last: int = STEPS) -> Any:
    model = _model()
    if settings.get("fp64", True):
        model = model.double()
    config = {"fp64": True, "micro_batch_size": 1, "global_batch_size": BATCH, "clip_grad": CLIP, **settings}
    engine = megatron_core.initialize(model, config, MAKERS[name](_groups(model))).engine
    if first:
        engine.load_checkpoint(folder)
    ranks, rank = engine.groups.size("dp"), engine.groups.index("dp")
    for step in range(first, last):
        for number in range(BATCH // ranks):
            point = _points(step)[number * ranks + rank : number * ranks + rank + 1]
            engine.backward(engine(point).square().mean())
            engine.step()
    if last < STEPS:
        engine.save_checkpoint(folder)
    return engine.full_state_dict()


@pytest.mark.parametrize("name", MAKERS)
def test_coupling(name: str) -> None:
    assert coupling_of(MAKERS[name](_model().parameters())) == COUPLING.get(name, "none")


@pytest.mark.parametrize("name", MAKERS)
def test_equals_its_own_steps(name: str) -> None:
    expected = _alone(MAKERS[name])
    stages = {"parameter": (0, 1), "model": (0,)}.get(COUPLING.get(name, "none"), (1, 3))
    for stage in stages:
        for found in run_ranks(2, _train, name, {"zero_stage": stage}):
            for key, weights in expected.items():
                torch.testing.assert_close(found[key], weights, rtol=1e-9, atol=1e-12)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["nadam", "adagrad", "adafactor", "trust"])
def test_resumes_in_another_layout(name: str, tmp_path: Path) -> None:
    expected, by_parameter = _alone(MAKERS[name]), name in COUPLING
    run_ranks(2, _train, name, {"zero_stage": 1 if by_parameter else 3}, str(tmp_path), 0, 2)
    for ranks, stage in ((4, 1), (2, 0)):
        for found in run_ranks(ranks, _train, name, {"zero_stage": stage}, str(tmp_path), 2):
            for key, weights in expected.items():
                torch.testing.assert_close(found[key], weights, rtol=1e-9, atol=1e-12)


def test_bfloat16_keeps_float32_weights() -> None:
    for stage in (0, 2):
        for before, after in run_ranks(2, _half, stage):
            assert (after != after.bfloat16().float()).any()
            assert (after - before).abs().max() > 1e-3


def _half(stage: int) -> tuple[Tensor, Tensor]:
    config = {"bf16": True, "global_batch_size": 2, "zero_stage": stage, "initial_loss_scale": 8.0}
    engine = megatron_core.initialize(_model(), config, partial(RMSprop, lr=1e-3)).engine
    weight = engine.module[0].weight
    before = engine.whole.weights(weight)
    for step in range(3):
        engine.backward(engine(_points(step)).square().mean())
        engine.step()
    with engine.gathered(weight):
        assert torch.equal(weight.detach(), engine.whole.weights(weight).bfloat16())
    return before, engine.whole.weights(weight)


def test_refused() -> None:
    for name, stage, advice in (("adafactor", 2, "zero_stage=1 or 0"), ("joint", 1, "zero_stage=0")):
        message = run_ranks(2, _refused, name, stage)
        assert all(advice in each and "the update of an element depends on" in each for each in message)
    model = _model()
    with pytest.raises(ConfigError, match="optimizer=LBFGS needs a closure"):
        megatron_core.initialize(model, {}, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="optimizer=RMSprop of torch needs weights in memory"):
        megatron_core.initialize(model, {"zero_stage": 3, "zero3_param_cpu_offload": True}, RMSprop(model.parameters()))


def _refused(name: str, stage: int) -> str:
    model = _model()
    with pytest.raises(ConfigError) as caught:
        megatron_core.initialize(model, {"zero_stage": stage, "global_batch_size": 2}, MAKERS[name](_groups(model)))
    return str(caught.value)
