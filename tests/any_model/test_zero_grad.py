"""``zero_grad`` of an engine, its module and its optimizers, and backwards that reach the module of another engine."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatron_core
from megatron_core.any_model import Engine
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

CONFIG = {"fp64": True, "micro_batch_size": 1, "global_batch_size": 1, "lr": 0.1, "optimizer": "sgd", "clip_grad": 0.0}
X = torch.ones(1, 3, dtype=torch.float64)
DISCARDS: dict[str, Callable[[Engine, Any], None]] = {
    "engine": lambda engine, optimizer: engine.zero_grad(),
    "module": lambda engine, optimizer: engine.module.zero_grad(),
    "engine's optimizer": lambda engine, optimizer: engine.optimizer.zero_grad(),
    "own optimizer": lambda engine, optimizer: optimizer.zero_grad(set_to_none=False),
}


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def _engine(**settings: Any) -> tuple[Engine, torch.optim.Optimizer]:
    model = _linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {name: value for name, value in (CONFIG | settings).items() if name != "optimizer"}
    return megatron_core.initialize(model, config, optimizer=optimizer).engine, optimizer


def _expected(*losses: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
    """The weight after a step on the sum of ``losses``, with torch alone."""
    model = _linear()
    torch.stack([loss(model) for loss in losses]).sum().backward()
    return model.weight.detach() - 0.1 * model.weight.grad


def _first(model: nn.Module) -> torch.Tensor:
    return model(X).square().sum()


def _second(model: nn.Module) -> torch.Tensor:
    return model(2 * X).sum()


def _weight(engine: Engine) -> torch.Tensor:
    return engine.full_state_dict()["weight"]


@pytest.mark.parametrize("name", DISCARDS)
@pytest.mark.parametrize("direct", [False, True])
def test_gradients_are_discarded(name: str, direct: bool) -> None:
    engine, optimizer = _engine()
    _first(engine).backward() if direct else engine.backward(_first(engine))
    DISCARDS[name](engine, optimizer)
    with pytest.raises(ConfigError, match=r"step\(\) without backward\(\)"):
        engine.step()
    engine.backward(_second(engine))
    report = engine.step()
    torch.testing.assert_close(_weight(engine), _expected(_second), rtol=0, atol=1e-15)
    assert report.loss == pytest.approx(_second(_linear()).item(), rel=1e-12)


@pytest.mark.parametrize("name", DISCARDS)
def test_micro_batches_that_were_taken_stay(name: str) -> None:
    """The usual loop calls ``zero_grad`` before each micro-batch, when ``step`` has taken the one before."""
    engine, optimizer = _engine(global_batch_size=2)
    for loss in (_first, _second):
        DISCARDS[name](engine, optimizer)
        engine.backward(loss(engine))
        engine.step()
    expected = _expected(lambda model: _first(model) / 2, lambda model: _second(model) / 2)
    torch.testing.assert_close(_weight(engine), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", DISCARDS)
def test_a_micro_batch_cannot_be_taken_out_of_an_accumulation(name: str) -> None:
    engine, optimizer = _engine(global_batch_size=2)
    engine.backward(_first(engine))
    engine.step()
    engine.backward(_first(engine))
    with pytest.raises(ConfigError, match=r"after a backward in micro-batch 2 of 2: its gradients have been added"):
        DISCARDS[name](engine, optimizer)
    engine.discard_gradients()
    engine.backward(_second(engine))
    engine.step()
    expected = _expected(lambda model: _second(model) / 2)
    torch.testing.assert_close(_weight(engine), expected, rtol=0, atol=1e-15)


def test_copies_of_the_module_are_independent() -> None:
    engine, _ = _engine()
    engine.backward(_first(engine))
    stored = io.BytesIO()
    torch.save(engine.module, stored)
    stored.seek(0)
    for other in (copy.deepcopy(engine.module), torch.load(stored, weights_only=False)):
        _first(other).backward()
        assert other.weight.grad is not None
        other.zero_grad()
        assert other.weight.grad is None
    engine.step()
    torch.testing.assert_close(_weight(engine), _expected(_first), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap_grad_reduce": True}, {"zero_stage": 2, "overlap_grad_reduce": True}, {"zero_stage": 3}],
    ids=str,
)
def test_sums_that_have_started_are_discarded(settings: dict[str, Any]) -> None:
    for found in run_ranks(2, _discard_on_two_ranks, settings):
        expected = _expected(_second)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-14)


def _discard_on_two_ranks(settings: dict[str, Any]) -> Any:
    engine, _ = _engine(global_batch_size=2, **settings)
    for loss in (_first, _first):
        engine.backward(loss(engine))
        engine.zero_grad()
    engine.backward(_second(engine))
    engine.step()
    return _weight(engine).numpy()


# Backwards that reach another engine.


def test_another_engine_with_a_loss_scale() -> None:
    """Both engines scale their losses by other factors; the sum of both gradients is that of float32."""
    half = {"fp64": False, "fp16": True, "initial_loss_scale": 64.0, "hysteresis": 1}
    first, _ = _engine(**half)
    second, _ = _engine(**(half | {"initial_loss_scale": 1024.0, "global_batch_size": 1}))
    x = X.half()
    first.backward(second(first(x).repeat(1, 2)[:, :3]).float().sum())
    first.step()
    assert second.step().grad_norm == pytest.approx(_norm_of_both(), rel=2e-3)


def _norm_of_both() -> float:
    first, second = _linear(), _linear()
    second(first(X).repeat(1, 2)[:, :3]).sum().backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in second.parameters()]))


def test_another_engine_with_a_sum_of_terms() -> None:
    first, second = _engine()[0], _engine()[0]

    def through_both() -> torch.Tensor:
        return second(first(X).repeat(1, 2)[:, :3]).sum()

    first.backward(through_both(), num_terms=2)
    first.step()
    with pytest.raises(ConfigError, match=r"another engine with num_terms, .* call zero_grad\(\)"):
        second.step()
    second.zero_grad()
    second.backward(_second(second))
    second.step()
    torch.testing.assert_close(_weight(second), _expected(_second), rtol=0, atol=1e-15)
