"""Overlapped gradient reductions and weight gathers are hidden behind computation.

Only known times are compared, on a simulated clock: messages arrive over a simulated link, and attention and MLP take
time in forward and in backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.slow_link import SimulatedClock, SlowLink
from megatron_core.reports.meter import METER
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

BASE = {"num_layers": 6, "global_batch_size": 4, "vocab_size": 16, "ddp_bucket_size": 12_000}
CLOCK = SimulatedClock()
COMPUTES, BANDWIDTH = 0.024, 3.3e6
"""Seconds of each module, and bytes per second: a layer of 12,700 float32 weights takes at most 15 ms."""


def _compute(*_: object) -> None:
    CLOCK.sleep(COMPUTES)


def _hidden(settings: dict[str, Any], kind: str) -> float:
    """Train two steps; return the part of the collectives ``kind`` that computation hides."""
    run = tiny_run(**BASE | settings)
    for stage in run.stages.values():
        for layer in stage.decoder.layers:
            for module in (layer.self_attention, layer.mlp):
                module.register_forward_hook(_compute)
                module.register_full_backward_hook(_compute)
    METER.start(run.groups, run.world.device)
    with SlowLink([kind], BANDWIDTH, CLOCK).installed() as link:
        for _ in range(2):
            train_step(run)
    METER.stop()
    return 1 - link.exposed / link.delayed


@pytest.mark.parametrize(
    ("kind", "base", "switch"),
    [
        ("all_reduce", {}, {"overlap_grad_reduce": True}),
        ("all_gather", {"zero_stage": 3}, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    ],
)
def test_computation_hides_at_least_60_percent(kind: str, base: dict[str, Any], switch: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    for off, on in zip(*(run_ranks(2, _hidden, base | more, kind) for more in ({}, switch)), strict=True):
        assert off < 0.1 and on > 0.6
