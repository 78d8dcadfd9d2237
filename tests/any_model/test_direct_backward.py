"""``loss.backward()`` and ``engine.scale(loss).backward()`` compute what ``engine.backward(loss)`` computes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megatron_core
from megatron_core.any_model import Engine
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted

ROWS: list[dict[str, Any]] = [
    {"global_batch_size": 2},
    {"global_batch_size": 6, "overlap_grad_reduce": True},
    {"global_batch_size": 6, "zero_stage": 1},
    {"global_batch_size": 6, "zero_stage": 2, "overlap_grad_reduce": True},
    {"global_batch_size": 6, "zero_stage": 3, "overlap_param_gather": True},
    {"global_batch_size": 2, "zero_stage": 3, "recompute_granularity": "full"},
]


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layers(x)
        return {"loss": y.square().mean(), "y": y}


def _engine(**settings: Any) -> Engine:
    config = {"micro_batch_size": 1, "global_batch_size": 4, "lr": 0.1, "clip_grad": 0.1, "fp64": True}
    return megatron_core.initialize(_WithLoss(), {**config, **settings}).engine


def _train(settings: dict[str, Any], how: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    engine, found = _engine(**settings), []
    points = iter(torch.randn(100, 1, 3, generator=torch.Generator().manual_seed(engine.groups.rank)).double())
    while len(found) < 2:
        x = next(points).requires_grad_()
        output = engine(x)
        # Gradients with respect to the input alone are not a backward of the step.
        twice = settings.get("zero_stage") != 3  # a second derivative needs the weights of all units together
        (slope,) = torch.autograd.grad(output["y"].sum(), x, create_graph=twice, retain_graph=True)
        loss = output["loss"] + 0.1 * slope.square().sum()
        if how == "engine":
            engine.backward(loss)
        else:
            (engine.scale(loss) if how == "scale" else loss).backward()
        report = engine.step()
        if report is not None:
            found.append((report.loss, report.grad_norm))
    return found, engine.full_state_dict()


@pytest.mark.parametrize("row", ROWS)
def test_equals_the_engines_backward(row: dict[str, Any]) -> None:
    for (reports, weights), (expected, reference) in run_ranks(2, _both, row):
        for (loss, norm), (_, other_norm) in zip(reports, expected, strict=True):
            assert math.isfinite(loss) and norm == pytest.approx(other_norm, rel=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, reference[name], rtol=1e-12, atol=1e-14)


def test_gradients_that_are_not_divided_are_found() -> None:
    target = "any_model.backward:EngineBackward._begin_direct"
    with planted(target, "missing / self._micro_batches", "missing"), pytest.raises(AssertionError):
        test_equals_the_engines_backward({"global_batch_size": 2})


def _both(row: dict[str, Any]) -> tuple[Any, Any]:
    return _train(row, "scale" if row.get("zero_stage") else "direct"), _train(row, "engine")


def test_loss_that_is_computed_outside_is_not_reported() -> None:
    engine = _engine(zero_stage=0)
    for _ in range(4):
        engine(torch.ones(1, 3).double())["y"].sum().exp().backward()
        report = engine.step()
    assert report is not None and math.isfinite(report.loss)  # that of the outputs
    engine = megatron_core.initialize(nn.Linear(3, 2), {"global_batch_size": 1, "micro_batch_size": 1}).engine
    engine(torch.ones(1, 3)).sum().backward()
    report = engine.step()
    assert report is not None and math.isnan(report.loss) and report.grad_norm > 0


def test_bad_use() -> None:
    engine = _engine(fp64=False, fp16=True, initial_loss_scale=1024.0)
    with pytest.raises(ConfigError, match=r"fp16=True: loss\.backward\(\) without the loss scale 1024"):
        engine(torch.ones(1, 3))["loss"].backward()
    before = engine.module.layers[0].weight.clone()
    for _ in range(4):
        engine.scale(engine(torch.ones(1, 3))["loss"]).backward()
        report = engine.step()
    assert report is not None and not report.skipped and (engine.module.layers[0].weight != before).any()
    engine.backward(engine.scale(engine(torch.ones(1, 3))["loss"]))
    with pytest.raises(ConfigError, match="without the loss scale"):  # the scale was for the backward before
        engine(torch.ones(1, 3))["loss"].backward()


class _Tempered(nn.Module):
    """Its loss reads the temperature, and an intermediate result, outside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x).tanh()
        return self.last(self.hidden)

    def losses(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Backward reaches the temperature, which is read last, before ``y``; the second loss does not depend on it."""
        return (y * self.temperature.exp()).square().mean(), self.hidden.square().mean()


def _batches() -> Tensor:
    """``[steps, micro-batches, 1, 3]``."""
    return torch.randn(2, 4, 1, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _tempered(settings: dict[str, Any], *, direct: bool) -> list[Any]:
    model = _Tempered().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"micro_batch_size": 1, "global_batch_size": 4, "clip_grad": 0.0, **settings}
    engine = megatron_core.initialize(model, config, optimizer).engine
    for batches in _batches():
        for x in batches[engine.groups.rank :: engine.groups.size("dp")]:
            loss, of_hidden = model.losses(engine(x))
            if direct:
                loss.backward(retain_graph=True)
                of_hidden.backward()
            else:
                engine.backward(loss, retain_graph=True)
                engine.backward(of_hidden)
            engine.step()
    return [tensor.numpy() for tensor in engine.full_state_dict().values()]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("settings", [{}, {"zero_stage": 1, "overlap_grad_reduce": True}, {"zero_stage": 2}])
def test_losses_that_read_parameters_and_intermediate_results(settings: dict[str, Any], direct: bool) -> None:  # C3
    model = _Tempered().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in _batches():
        optimizer.zero_grad()
        for x in batches:
            (sum(model.losses(model(x))) / len(batches)).backward()
        optimizer.step()
    expected = [parameter.detach().numpy() for parameter in model.state_dict().values()]
    for found in run_ranks(2, partial(_tempered, direct=direct), settings):
        for weights, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(weights, reference, rtol=1e-12, atol=1e-14)
