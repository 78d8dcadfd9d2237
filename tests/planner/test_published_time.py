"""Published steps are predicted, those that were not fitted as well as those that were."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.bench_planner import correlation, errors, published_steps
from megatron_core.config.validate import problems, without_data
from megatron_core.planner.groups import Ring
from megatron_core.planner.hardware import read_hardware
from tests.ops.checks import WHOLE_MATRIX

STEPS = [step for step in published_steps() if step.comparable]
QUICK = [step for step in STEPS if step.config.parallel.pipeline_model_parallel_size <= 8]


def test_every_row_is_a_run_that_could_start() -> None:
    assert len(STEPS) >= 80 and len({step.table for step in STEPS}) >= 10
    for step in STEPS if WHOLE_MATRIX else QUICK[::4]:
        assert not list(problems(without_data(step.config), step.world_size)), step.id


@pytest.mark.parametrize("half", [0, 1], ids=["fitted", "judged"])
def test_errors(half: int) -> None:
    """Mean at most 10 %, worst at most 25 %, as docs/planner.md has them for all rows."""
    chosen = [step for step in (STEPS if WHOLE_MATRIX else QUICK) if step.half == half]
    found = errors(chosen)
    assert statistics.mean(abs(error) for _, error in found) <= 0.1
    for step, error in found:
        assert abs(error) <= 0.25, step.id


def test_collectives_by_hand() -> None:
    """16 ranks side by side on 2 nodes send through all 8 links of a node; 8 apart each has its own alone."""
    machine = read_hardware("h100")
    side_by_side, apart = Ring.of(machine, 16, 1), Ring.of(machine, 16, 8)
    assert (side_by_side.local, apart.local) == (8, 1)
    assert side_by_side.bandwidth == min(8 * machine.inter.bandwidth, machine.intra.bandwidth)
    assert apart.gather(1e9) == pytest.approx(15 / 16 * 1e9 / machine.inter.bandwidth + 4 * machine.inter.latency)
    assert apart.reduce(1e9) == 2 * apart.gather(1e9)
    assert Ring.of(machine, 1, 1).gather(1e9) == Ring.of(machine, 1, 1).all_to_all(1e9) == 0.0
    leaves = side_by_side.all_to_all(1e9) - 4 * machine.inter.latency
    assert leaves == pytest.approx(1e9 * 8 / 16 / machine.inter.bandwidth)


def test_rank_correlation() -> None:
    assert correlation([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == pytest.approx(1.0)
    assert correlation([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)]) == pytest.approx(-1.0)
