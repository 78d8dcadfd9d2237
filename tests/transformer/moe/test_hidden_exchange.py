"""--overlap-moe-expert-parallel-comm hides the exchange between experts behind another micro-batch's computation.

All ranks share few cores with other processes, so only known times are compared: messages arrive over a simulated link,
and attention and experts sleep in forward and in backward, for longer than a message takes.
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
from tests.parity.moe_rows import EP2, MIXTRAL, PP2
from tests.runs import tiny_run

ON = {"overlap_moe_expert_parallel_comm": True}
EVEN = {"micro_batch_size": 1, "moe_router_force_load_balancing": True}
COMPUTES, BANDWIDTH = 0.006, 1e6
"""Seconds of sleep in each module, and bytes per second: a message of [32, 32] float32 to another rank takes 2 ms."""


def _sleep(*_: object) -> None:
    time.sleep(COMPUTES)


def _train(settings: dict[str, Any]) -> tuple[float, float, float, list[Any]]:
    """Train three steps.

    Return the least and the largest hidden part of the exchange in a step (a busy system disturbs some steps, but not
    all), the part that could be hidden, and losses and weights.
    """
    run = tiny_run(**settings)
    for stage in run.stages.values():
        for layer in stage.decoder.layers:
            for module in (layer.self_attention, layer.mlp.experts):
                module.register_forward_hook(_sleep)
                module.register_full_backward_hook(_sleep)
    plan = run.plans.training(run.step_after(0).num_microbatches)
    actions = [action for action in plan.ranks[run.groups.index("pp")] if action.kind != "W"]
    METER.start(run.groups, run.world.device)
    with SlowLink(["all_to_all"], BANDWIDTH).installed() as link:
        results: list[Any] = []
        parts = []
        for _ in range(3):
            exposed, delayed = link.exposed, link.delayed
            results.append(train_step(run).loss)
            parts.append(1 - (link.exposed - exposed) / (link.delayed - delayed))
    METER.stop()
    results += [weight.detach().numpy().tobytes() for stage in run.stages.values() for weight in stage.parameters()]
    return min(parts), max(parts), 2 * len(plan.paired & set(actions)) / len(actions), results


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"global_batch_size": 12}),
        (4, PP2 | {"num_layers": 4, "pipeline_schedule": "dualpipe_v", "global_batch_size": 12}),
    ],
)
def test_another_micro_batch_hides_the_exchange(ranks: int, layout: dict[str, Any]) -> None:
    base = MIXTRAL | EP2 | EVEN | layout
    torch.set_num_threads(1)
    off, on = (run_ranks(ranks, _train, base | switch) for switch in ({}, ON))
    for (alone, _, nothing, expected), (_, hidden, possible, results) in zip(off, on, strict=True):
        assert nothing == 0.0 and alone < 0.3, "one after the other"
        assert possible > 0.5, "the plan has pairs"
        assert hidden > 0.6 * possible, "at least 60 % of what could be hidden"
        assert results == expected, "no bit changes"
