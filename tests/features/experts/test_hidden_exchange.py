"""--overlap-moe-expert-parallel-comm hides the exchange between experts behind another micro-batch's computation.

Only known times are compared, on a simulated clock: messages arrive over a simulated link, and attention and experts
take longer than a message in forward and in backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.slow_link import SimulatedClock, SlowLink
from megatron_core.reports.meter import METER
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.parity.moe_rows import EP2, MIXTRAL, PP2
from tests.runs import tiny_run

ON = {"overlap_moe_expert_parallel_comm": True}
EVEN = {"micro_batch_size": 1, "moe_router_force_load_balancing": True}
CLOCK = SimulatedClock()
COMPUTES, BANDWIDTH = 0.006, 1e6
"""Seconds of each module, and bytes per second: a message of [32, 32] float32 to another rank takes 2 ms."""


def _compute(*_: object) -> None:
    CLOCK.sleep(COMPUTES)


def _train(settings: dict[str, Any]) -> tuple[float, float, list[Any]]:
    """Train two steps.

    Return the hidden part of the exchange, the part that could be hidden, and losses and weights.
    """
    run = tiny_run(**settings)
    for stage in run.stages.values():
        for layer in stage.decoder.layers:
            for module in (layer.self_attention, layer.mlp.experts):
                module.register_forward_hook(_compute)
                module.register_full_backward_hook(_compute)
    plan = run.plans.training(run.step_after(0).num_microbatches)
    actions = [action for action in plan.ranks[run.groups.index("pp")] if action.kind != "W"]
    METER.start(run.groups, run.world.device)
    with SlowLink(["all_to_all"], BANDWIDTH, CLOCK).installed() as link:
        results: list[Any] = [train_step(run).loss for _ in range(2)]
    METER.stop()
    results += [weight.detach().numpy().tobytes() for stage in run.stages.values() for weight in stage.parameters()]
    return 1 - link.exposed / link.delayed, 2 * len(plan.paired & set(actions)) / len(actions), results


@pytest.mark.drawn(1)
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
    for (alone, nothing, expected), (hidden, possible, results) in zip(off, on, strict=True):
        assert nothing == 0.0 and abs(alone) < 1e-9, "one after the other"
        assert possible > 0.5, "the plan has pairs"
        assert hidden > 0.95 * possible, "at least 95 % of what could be hidden"
        assert results == expected, "no bit changes"
