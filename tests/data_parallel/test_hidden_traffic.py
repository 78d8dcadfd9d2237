"""Overlapped gradient reductions and weight gathers are hidden behind computation.

Only known times are compared: messages arrive over a simulated link, and attention and MLP sleep in forward and in
backward.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks.slow_link import SlowLink
from megatron_core.parallel.meter import METER
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

BASE = {"num_layers": 6, "global_batch_size": 4, "vocab_size": 16, "ddp_bucket_size": 12_000}
COMPUTES, BANDWIDTH = 0.024, 3.3e6
"""Seconds of sleep in each module, and bytes per second: a layer of 12,700 float32 weights takes at most 15 ms."""


def _sleep(*_: object) -> None:
    time.sleep(COMPUTES)


def _hidden(settings: dict[str, Any], kind: str) -> tuple[float, float]:
    """Train three steps; return the least and the largest part of the collectives ``kind`` that computation hides.

    A system that stops a rank between a call and its wait hides a part of the delay; one that stops it at other times
    exposes more. Neither happens in every step.
    """
    run = tiny_run(**BASE | settings)
    for stage in run.stages.values():
        for layer in stage.decoder.layers:
            for module in (layer.self_attention, layer.mlp):
                module.register_forward_hook(_sleep)
                module.register_full_backward_hook(_sleep)
    METER.start(run.groups, run.world.device)
    parts = []
    with SlowLink([kind], BANDWIDTH).installed() as link:
        for _ in range(3):
            exposed, delayed = link.exposed, link.delayed
            train_step(run)
            parts.append(1 - (link.exposed - exposed) / (link.delayed - delayed))
    METER.stop()
    return min(parts), max(parts)


@pytest.mark.parametrize(
    ("kind", "base", "switch"),
    [
        ("all_reduce", {}, {"overlap_grad_reduce": True}),
        ("all_gather", {"zero_stage": 3}, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    ],
)
def test_computation_hides_at_least_60_percent(kind: str, base: dict[str, Any], switch: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    for (off, _), (_, on) in zip(*(run_ranks(2, _hidden, base | more, kind) for more in ({}, switch)), strict=True):
        assert off < 0.5 and on > 0.6
