"""Optimizers, schedulers and learning rates that the program changes itself, against torch alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import megatron_core
from megatron_core.errors import CheckpointError, ConfigError

STEPS = 6
CONFIG = {"fp64": True, "micro_batch_size": 2, "global_batch_size": 4, "clip_grad": 0.0}
Made = Callable[[Any], Any]
Change = Callable[[int, optim.Optimizer], None]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _weights(model: nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy().copy()


def _alone(make: Made, schedule: Made | None = None, change: Change | None = None, steps: int = STEPS) -> np.ndarray:
    model = _model()
    optimizer = make(model)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(steps):
        model(_inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if change is not None:
            change(step, optimizer)
    return _weights(model)


def _step(engine: Any, step: int) -> None:
    for part in _inputs(step).split(2):
        engine.backward(engine(part).square().mean())
        engine.step()


def _with_engine(make: Made, schedule: Made | None = None, change: Change | None = None) -> np.ndarray:
    model = _model()
    optimizer = make(model)
    scheduler = schedule(optimizer) if schedule else None
    engine, own, _, _ = megatron_core.initialize(model, CONFIG, optimizer, lr_scheduler=scheduler)
    for step in range(STEPS):
        _step(engine, step)
        if change is not None:
            change(step, own)
    return _weights(engine.module)


def _adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2)


def _sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


def _sequential(optimizer: optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


SCHEDULES: dict[str, tuple[Made, Made]] = {
    "sequential": (_adamw, _sequential),
    "chained": (_sgd, lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.7)])),
    "one cycle of momentum": (_sgd, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1)),
    "one cycle of betas": (_adamw, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1)),
    "cyclic": (_sgd, lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, 2)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_the_given_optimizer(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(_with_engine(*SCHEDULES[name]), _alone(*SCHEDULES[name]), rtol=1e-9)


def _set_rates(step: int, optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (step + 2)


def _set_momentum(step: int, optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["momentum"] = 0.5


@pytest.mark.parametrize(("make", "change"), [(_adamw, _set_rates), (_sgd, _set_momentum)])
def test_settings_that_the_program_writes_into_groups(make: Made, change: Change) -> None:
    np.testing.assert_allclose(_with_engine(make, None, change), _alone(make, None, change), rtol=1e-9)


def test_a_scheduler_that_the_program_steps_itself() -> None:
    model = _model()
    optimizer = _adamw(model)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.1)
    engine = megatron_core.initialize(model, CONFIG, optimizer).engine
    for step in range(STEPS):
        for part in _inputs(step).split(2):
            engine.backward(engine(part).square().mean())
            optimizer.step()  # the engine's
        scheduler.step()
    expected = _alone(_adamw, lambda o: lr_scheduler.StepLR(o, 2, 0.1))
    np.testing.assert_allclose(_weights(model), expected, rtol=1e-9)


def test_momentum_without_state() -> None:
    model = _model()
    engine, own, _, _ = megatron_core.initialize(model, CONFIG, optim.SGD(model.parameters(), lr=1e-2))
    own.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"momentum=0\.9 in a parameter group of SGD without momentum"):
        _step(engine, 0)


def _started(model: nn.Module) -> optim.Optimizer:
    optimizer = _adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _of_group(kind: Any, **settings: Any) -> Made:
    options = {"momentum": 0.9} if kind is optim.SGD else {}
    return lambda model: kind([{"params": list(model.parameters()), **settings}], lr=1e-2, **options)


@pytest.mark.parametrize(
    "make",
    [_started, _of_group(optim.SGD, nesterov=True), _of_group(optim.AdamW, maximize=True)],
    ids=["after a step", "nesterov in a group", "maximize in a group"],
)
def test_options_that_the_kernels_lack(make: Made) -> None:
    np.testing.assert_allclose(_with_engine(make), _alone(make), rtol=1e-9)


def test_groups_keep_their_entries() -> None:
    model = _model()
    groups = [
        {"params": model[0].parameters(), "betas": (0.5, 0.6), "lr_scale": 0.1},
        {"params": model[2].parameters(), "eps": 1e-3, "name": "head"},
    ]
    settings = {**CONFIG, "lr": 1e-2, "weight_decay": 0.01, "adam_beta2": 0.999}
    engine, own, _, _ = megatron_core.initialize(model, settings, model_parameters=groups)
    assert [(g.get("lr_scale"), g.get("name")) for g in own.param_groups] == [(0.1, None), (None, "head")]
    for step in range(STEPS):
        _step(engine, step)

    def make(model: nn.Module) -> optim.Optimizer:
        first, last = ({"params": list(model[at].parameters())} for at in (0, 2))
        return optim.AdamW([{**first, "betas": (0.5, 0.6)}, {**last, "eps": 1e-3}], lr=1e-2)

    np.testing.assert_allclose(_weights(model), _alone(make), rtol=1e-9)


def _milestones(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.1)


@pytest.mark.parametrize(("is_passed", "saved"), [(True, 3), (False, 3), (False, 2)])  # 2: the rate has just changed
def test_schedules_continue_after_a_resume(is_passed: bool, saved: int, tmp_path: Path) -> None:
    def start() -> tuple[Any, Any]:
        model = _model()
        optimizer = _sgd(model)
        scheduler = _milestones(optimizer)
        engine = megatron_core.initialize(model, CONFIG, optimizer, lr_scheduler=scheduler if is_passed else None)[0]
        return engine, scheduler

    def train(engine: Any, scheduler: Any, first: int, last: int) -> None:
        for step in range(first, last):
            _step(engine, step)
            if not is_passed:
                scheduler.step()

    engine, scheduler = start()
    train(engine, scheduler, 0, saved)
    engine.save_checkpoint(tmp_path)
    own_state = deepcopy(scheduler.state_dict())
    engine, scheduler = start()
    engine.load_checkpoint(tmp_path)
    if not is_passed:
        scheduler.load_state_dict(own_state)
    train(engine, scheduler, saved, STEPS)
    np.testing.assert_allclose(_weights(engine.module), _alone(_sgd, _milestones), rtol=1e-9)
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_loading_undoes_a_rate_of_the_program(tmp_path: Path) -> None:
    model = _model()
    settings = {**CONFIG, "lr": 1e-2, "lr_decay_style": "linear", "train_iters": STEPS}
    engine, own, _, _ = megatron_core.initialize(model, settings)
    _step(engine, 0)
    engine.save_checkpoint(tmp_path)
    _set_rates(0, own)
    engine.load_checkpoint(tmp_path)
    _step(engine, 1)
    assert own.param_groups[0]["lr"] == pytest.approx(1e-2 * (1 - 2 / STEPS))


def test_a_rate_of_the_program_that_it_sets_again_after_loading(tmp_path: Path) -> None:
    model = _model()
    engine, own, _, _ = megatron_core.initialize(model, CONFIG, optim.AdamW(model.parameters(), lr=1e-5))
    engine.save_checkpoint(tmp_path)
    for _ in range(2):  # the second time after a search for the best rate
        own.param_groups[0]["lr"] = 1e-2
        for step in range(STEPS):
            _step(engine, step)
        found = _weights(model)
        engine.load_checkpoint(tmp_path)
        assert own.param_groups[0]["lr"] == 1e-5
    np.testing.assert_allclose(found, _alone(_adamw), rtol=1e-9)


class _Factor:
    """A schedule with a state that is not JSON."""

    def __init__(self) -> None:
        self.base, self.calls = torch.tensor([0.5, 0.6]), 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return float(self.base[0]) ** self.calls


def _amsgrad(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)


RATE = torch.tensor(1e-2, dtype=torch.float64)
WITHOUT_JSON: dict[str, tuple[Made, Made]] = {
    "betas of an own optimizer": (_amsgrad, SCHEDULES["one cycle of betas"][1]),
    "a callable object": (_adamw, lambda o: lr_scheduler.LambdaLR(o, _Factor())),
    "a callable object inside": (
        _adamw,
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LambdaLR(o, _Factor()), lr_scheduler.ExponentialLR(o, 0.5)], [5]
        ),
    ),
    "a tensor as rate": (
        lambda model: optim.AdamW(model.parameters(), lr=RATE.clone()),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.5)]),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_JSON)
def test_states_of_schedulers_that_are_not_json(name: str, tmp_path: Path) -> None:
    make, schedule = WITHOUT_JSON[name]
    for first, last in ((0, 3), (3, STEPS)):
        model = _model()
        optimizer = make(model)
        engine = megatron_core.initialize(model, CONFIG, optimizer, lr_scheduler=schedule(optimizer)).engine
        if first:
            engine.load_checkpoint(tmp_path)
        for step in range(first, last):
            _step(engine, step)
        engine.save_checkpoint(tmp_path)
    np.testing.assert_allclose(_weights(model), _alone(make, schedule), rtol=1e-9)


def _with_frozen_group(model: nn.Module) -> optim.Optimizer:
    model[0].requires_grad_(False)
    return optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}], lr=1e-2)


@pytest.mark.parametrize("is_function", [True, False])
def test_groups_without_trained_parameters_have_a_rate(is_function: bool) -> None:
    def schedule(optimizer: optim.Optimizer) -> Any:
        return lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step])

    model = _model()
    optimizer = _with_frozen_group(model)
    scheduler = schedule if is_function else schedule(optimizer)
    engine = megatron_core.initialize(model, CONFIG, optimizer, lr_scheduler=scheduler).engine
    for step in range(STEPS):
        _step(engine, step)
    np.testing.assert_allclose(_weights(model), _alone(_with_frozen_group, schedule), rtol=1e-9)


def test_hooks_of_the_given_optimizer() -> None:
    calls = []
    model = _model()
    optimizer = _adamw(model)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    engine = megatron_core.initialize(model, CONFIG, optimizer).engine
    for step in range(STEPS):
        _step(engine, step)
    assert len(calls) == STEPS
    np.testing.assert_allclose(_weights(model), _alone(_adamw), rtol=1e-9)


def test_groups_and_hooks_after_initialize_are_refused() -> None:
    model = _model()
    optimizer = _adamw(model)
    own = megatron_core.initialize(model, CONFIG, optimizer).optimizer
    for each in (optimizer, own):
        with pytest.raises(ConfigError, match="add_param_group after megatron_core"):
            each.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        for register in (each.register_step_pre_hook, each.register_step_post_hook):
            with pytest.raises(ConfigError, match=r"engine\.step\(\) does not call hooks of an optimizer"):
                register(lambda *_: None)


def test_bad_use() -> None:
    model = _model()
    optimizer = _adamw(model)
    with pytest.raises(ConfigError, match=r"lr_scheduler=ReduceLROnPlateau: its step\(\) needs an argument"):
        megatron_core.initialize(model, CONFIG, optimizer, lr_scheduler=lr_scheduler.ReduceLROnPlateau(optimizer))
    model = _model()
    optimizer = _adamw(model)
    _, own, _, scheduler = megatron_core.initialize(model, CONFIG, optimizer, lr_scheduler=lr_scheduler.ConstantLR)
    assert isinstance(scheduler, lr_scheduler.ConstantLR)
    assert own.defaults["lr"] == optimizer.defaults["lr"]  # read by transformers' polynomial and cosine_with_min_lr
    for each in (own, optimizer):
        with pytest.raises(CheckpointError, match=r"use engine\.save_checkpoint"):
            each.state_dict()
        with pytest.raises(CheckpointError, match=r"engine\.load_checkpoint"):
            each.load_state_dict({})


@pytest.mark.parametrize(
    "make", [_sgd, _amsgrad, lambda m: optim.Adagrad(m.parameters(), initial_accumulator_value=0.1)]
)
def test_a_checkpoint_of_no_step_has_no_state(make: Made, tmp_path: Path) -> None:
    model = _model()
    engine = megatron_core.initialize(model, CONFIG, make(model)).engine
    engine.save_checkpoint(tmp_path)
    for step in range(2):
        _step(engine, step)
    engine.load_checkpoint(tmp_path)
    for step in range(STEPS):
        _step(engine, step)
    np.testing.assert_allclose(_weights(model), _alone(make), rtol=1e-9)


def test_the_lowest_rate_belongs_to_the_rate_of_the_given_optimizer() -> None:
    config = {**CONFIG, "train_iters": 2, "lr_decay_style": "cosine", "min_lr": 1e-6}
    for settings, expected in ((config, 1e-6), (config | {"lr": 1e-2}, 1e-5 * (1e-6 / 1e-2))):
        model = _model()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
        engine, own, _, _ = megatron_core.initialize(model, settings, optim.AdamW(groups, lr=1e-5))
        for step in range(2):
            _step(engine, step)
        assert [group["lr"] for group in own.param_groups] == pytest.approx([expected, 0.0], rel=1e-9, abs=0.0)
