"""Pipeline schedules, in addition to the matrix: bitwise equality, custom plans, and fp16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_core.config import RunConfig
from megatron_core.schedules import one_f_one_b
from megatron_core.schedules.actions import Action, Plan
from megatron_core.training.step import train_step
from megatron_core.verify import trace_training
from megatron_core.verify.bounds import FLOAT64_BOUND, relative_errors
from megatron_core.verify.ranks import run_ranks
from tests.parity.rows import BASE, PP2, ROWS, SYNCHRONOUS, ZB_H1, ZB_V, compare
from tests.runs import tiny_run
from tests.schedules.plans import format_plan


@pytest.mark.parametrize("row", ["pp2 zb_v", "pp4 dualpipe_v"])
def test_overlap_changes_no_bit(row: str) -> None:
    """Early receives and late waits for sends do not change results."""
    world_size, model, layout = ROWS[row]
    overlapped, waiting = (
        trace_training(RunConfig.from_flat(BASE | model | layout | way), world_size, 2) for way in ({}, SYNCHRONOUS)
    )
    assert overlapped.faults == waiting.faults == []
    assert (overlapped.losses, overlapped.norms) == (waiting.losses, waiting.norms)
    assert all(np.array_equal(overlapped.tensors[name], waiting.tensors[name]) for name in overlapped.tensors)


def _permuted(plan: Plan, order: list[int]) -> Plan:
    """The same plan with a different order of micro-batches."""
    renumbered = ([Action(a.stage, a.kind, order[a.micro]) for a in actions] for actions in plan.ranks)
    return Plan(tuple(map(tuple, renumbered)), plan.stage_to_rank)


def test_a_plan_of_ones_own(tmp_path: Path) -> None:
    """1F1B with reversed micro-batches, and a handwritten plan with two neighbouring stages on a rank."""
    own = {
        "backwards.txt": format_plan(_permuted(one_f_one_b(2, 4), [3, 2, 1, 0])),
        "by_hand.txt": "stage_to_rank: 0 1 1 0  # half of the backwards are split\n"
        "0F0 0F1 0F2 3F0 3B0 0F3 3F1 3B1 3F2 3I2 0B0 0I1 3F3 3B3 0W1 3W2 0B2 0B3\n"
        "1F0 2F0 1F1 2F1 2B0 1F2 2I1 1B0 2F2 1I1 2W1 1W1 1F3 2F3 2B2 2I3 1B2 1B3 2W3\n",
    }
    for name, text in own.items():
        path = tmp_path / name
        path.write_text(text)
        chunks = {"num_virtual_stages_per_pipeline_rank": 2} if name == "by_hand.txt" else {}
        found, baseline = compare(2, {"global_batch_size": 4}, PP2 | chunks | {"pipeline_plan": str(path)})
        assert found.faults == []
        assert max(relative_errors(found, baseline).values()) < FLOAT64_BOUND


FP16 = {"fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1, "num_layers": 4, "lr": 1e-3, "train_iters": 100}


def _train(settings: dict) -> tuple[list[float], list[tuple[float, float]]]:
    """The scale of every step, and loss and gradient norm of the steps that were taken."""
    run = tiny_run(**FP16 | settings)
    results = [train_step(run) for _ in range(12)]
    return [r.loss_scale for r in results], [(r.loss, r.grad_norm) for r in results if not r.skipped]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("schedule", [ZB_H1, ZB_V], ids=["zb_h1", "zb_v"])
def test_loss_scaling_in_fp16(schedule: dict) -> None:
    """The scale decreases equally on all ranks until no gradient overflows, whether in an I or in a W."""
    ((scales, taken),) = run_ranks(1, _train, {})
    first, second = run_ranks(2, _train, PP2 | schedule)
    assert first == second
    assert first[0] == scales and scales[-1] < scales[0]
    assert 4 < len(taken) < 12, "some steps overflow"
    assert np.array(first[1]) == pytest.approx(np.array(taken), rel=2.0**-8)  # float16 has 11 bits
