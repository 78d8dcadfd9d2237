"""``loss.backward()`` and ``engine.scale(loss).backward()`` compute what ``engine.backward(loss)`` computes."""

from __future__ import annotations

import math
from typing import Any

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
