"""A model whose program constructs one engine after another, as to find a batch size that fits in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatron_core
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

RATES = (0.05, 0.02, 0.01)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def _inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _train(settings: dict[str, Any], keeps_first: bool) -> tuple[list[float], dict[str, torch.Tensor], str]:
    model = _model()
    losses: list[float] = []
    first: Any = None
    for rate in RATES:
        options = {"lr": rate, "micro_batch_size": 2, "clip_grad": 0.5, "weight_decay": 0.1, **settings}
        engine = megatron_core.initialize(model, options).engine
        first = first or (engine if keeps_first else None)
        for step in range(2):
            rows = _inputs(step).chunk(engine.groups.size("dp"))[engine.groups.index("dp")]
            engine.backward(engine(rows).pow(2).mean())
            report = engine.step()
            assert report is not None
            losses.append(report.loss)
    message = ""
    if first is not None:
        with pytest.raises(ConfigError) as error:
            first(_inputs(0))
        message = str(error.value)
    return losses, engine.full_state_dict(), message


def _train_with_torch() -> tuple[list[float], nn.Module]:
    model = _model()
    losses = []
    for rate in RATES:
        decayed, others = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=rate)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(_inputs(step)).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_engines_after_another_equal_optimizers_after_another(stage: int) -> None:
    settings = {"zero_stage": stage, "overlap_grad_reduce": True, "overlap_param_gather": stage > 0}
    settings |= {"lr_decay_style": "constant"}
    expected, model = _train_with_torch()
    for losses, weights, message in run_ranks(2, _train, settings, stage == 3):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert ("another engine was constructed for this model" in message) == (stage == 3)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-12)
