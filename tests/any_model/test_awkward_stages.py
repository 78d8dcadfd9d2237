"""Pipeline stages in which data-parallel ranks run different modules, against torch in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_core
from megatron_core.any_model.layers import PipelineModule
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted

WIDTH, LAYERS, STEPS, MICRO_BATCHES, REPLICAS = 6, 4, 3, 4, 2
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1, "weight_decay": 0.0, "clip_grad": 0.0}
CONFIG = {"fp64": True, "micro_batch_size": 1, "global_batch_size": MICRO_BATCHES * REPLICAS, **SGD}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 20}
ROWS: list[dict[str, Any]] = [
    {"zero_stage": 1, "num_virtual_stages_per_pipeline_rank": 2, **OVERLAP},
    {"zero_stage": 2, "pipeline_schedule": "1f1b", **OVERLAP},
    {"zero_stage": 2, "pipeline_schedule": "zb_h1"},
    {"zero_stage": 2, "pipeline_schedule": "zb_h1", **OVERLAP},
    {"zero_stage": 2, "pipeline_schedule": "zb_v", **OVERLAP},
    {"zero_stage": 3, "pipeline_schedule": "1f1b"},
    {"zero_stage": 3, "pipeline_schedule": "zb_h1", **OVERLAP},
]


class Skipped(nn.Module):
    """A layer that runs for some samples; the last channel is the number of the sample."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position
        inner = WIDTH + position
        self.inner = nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``x``, or ``x`` and the output of the layer; the first and the last layer run for every sample."""
        number = int(x.detach()[0, -1])
        channels = x[:, :WIDTH]
        if self.position in (0, LAYERS - 1) or (number + self.position) % 3:
            channels = channels + self.inner(channels)
        return torch.cat([channels, x[:, WIDTH:]], 1)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, :WIDTH] - target).square().mean()


def _batches(step: int, replica: int | None = None) -> list[tuple[Tensor, Tensor]]:
    count = MICRO_BATCHES * REPLICAS
    numbers = [n for n in range(step * count, (step + 1) * count) if replica in (None, n % REPLICAS)]
    draws = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in numbers]
    inputs = [torch.cat([x, torch.full((2, 1), float(n)).double()], 1) for n, x in zip(numbers, draws, strict=True)]
    return [(x, torch.ones(2, WIDTH, dtype=torch.float64)) for x in inputs]


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Skipped(position).double() for position in range(LAYERS)]


@cache
def _reference() -> dict[str, Any]:
    model = nn.Sequential(*_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for x, target in _batches(step):
            (_loss(model(x), target) / (MICRO_BATCHES * REPLICAS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def _train(settings: dict[str, Any]) -> dict[str, Any]:
    config = {**CONFIG, "pipeline_model_parallel_size": dist.get_world_size() // REPLICAS, **settings}
    engine = megatron_core.initialize(PipelineModule(_layers(), loss_fn=_loss), config).engine
    for step in range(STEPS):
        engine.train_batch(iter(_batches(step, engine.groups.index("dp"))))
    return {name: tensor.numpy() for name, tensor in engine.full_state_dict().items()}


@pytest.mark.every_case
@pytest.mark.parametrize("settings", ROWS, ids=str)
def test_stages_equal_torch(settings: dict[str, Any]) -> None:
    for found in run_ranks(4, _train, settings):
        assert found
        for name, weight in found.items():
            np.testing.assert_allclose(weight, _reference()[name], rtol=0, atol=1e-13, err_msg=name)


def test_comparison_finds_sums_in_another_order() -> None:
    """Ranks that skip a layer would start its sum after those of other stages."""
    with planted("data_parallel.wrapper:DataParallel.end_action", "self.start_grad_sync(action.stage)", "pass"):
        found = run_ranks(4, _train, ROWS[0])
    assert max(abs(weight - _reference()[name]).max() for each in found for name, weight in each.items()) > 1e-9
