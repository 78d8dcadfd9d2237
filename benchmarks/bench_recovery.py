"""Measure the cost of ``--recover in-process`` without failures, by the processor time of whole training steps.

Steps without and with the copy of the state alternate on the same ranks: a GPT of 5 million parameters and 512 tokens
in a step of each rank, for which the relative cost is high. The time of supervisors, keepers and the thread that waits
for failures is measured in a job of two ranks. Appends to benchmarks/results.csv; ratio there is the cost as a share of
a step.

python -m benchmarks.bench_recovery
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.resilience.processes.memory import HostMemory
from megatron_core.resilience.state_copies import StateCopies
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.end_to_end.test_failures import ranks_without_launcher

SHAPE: dict[str, Any] = {
    **{"num_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 1024},
    **{"micro_batch_size": 2, "global_batch_size": 4, "mock_data": True, "train_iters": 1000, "lr": 1e-4},
}
ZERO = {"use_distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2, whole copies": {"recover_without_spare": True},
    "dp2 zero1": ZERO,
    "dp2 zero3": {"zero_stage": 3},
    "dp2 zero1, 4 micro-batches": ZERO | {"global_batch_size": 16},
}
JOB_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the processor time of steps with and without copies of the state."""

    repeats: int = 15
    """Number of pairs of steps, of which the median is reported."""


class WithoutFailures:
    """The part of a recovery that copies use in a run without failures."""

    generation = 0

    def __init__(self) -> None:
        self.memory = HostMemory()

    def report_training(self) -> None:
        """No effect: no failure was before this step."""

    def regroup_when_due(self, iteration: int) -> None:
        """No effect: no rank joins."""


def measure(layout: dict[str, Any], repeats: int) -> list[tuple[float, float]]:
    """Processor seconds of a step and of a copy, alternating, on one rank."""
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    run = set_up(RunConfig.from_flat(SHAPE | {"recover": "in-process"} | layout), world)
    copies = StateCopies(WithoutFailures())  # type: ignore[arg-type]
    copies.run = run
    seconds = []
    for _ in range(repeats + 3):
        dist.barrier()
        began = time.process_time()
        train_step(run)
        run.data_parallel.finish_param_sync()
        between = time.process_time()
        copies.before_step()
        seconds.append((between - began, time.process_time() - between))
    return seconds[3:]  # memory of the two copies is new in the first ones


def processor_seconds(process: Path) -> float:
    """User and system time of a process or a thread."""
    numbers = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def supervision() -> tuple[float, float]:
    """Processor seconds per second and rank of supervisors, keepers and waiting threads, and of training."""
    with tempfile.TemporaryDirectory() as name:
        settings = SHAPE | {"train_iters": 10**6, "recover": "in-process"}
        with ranks_without_launcher([Path(name) / "0", Path(name) / "1"], **settings) as ranks:
            while "iteration 3/" not in "".join(path.read_text() for path in Path(name).iterdir()):
                time.sleep(0.1)
            parents = [Path(f"/proc/{rank.pid}") for rank in ranks]
            found = [_split(parent) for parent in parents]
            time.sleep(JOB_SECONDS)
            spent = [_split(parent) for parent in parents]
    others, training = (
        sum(b[at] - a[at] for a, b in zip(found, spent, strict=True)) / JOB_SECONDS / len(parents) for at in (0, 1)
    )
    return others, training


def _split(parent: Path) -> tuple[float, float]:
    """Processor seconds of supervision and of the main thread of training."""
    pids = (parent / "task" / parent.name / "children").read_text().split()
    keeper, training = (Path("/proc") / pid for pid in pids)
    main = processor_seconds(training / "task" / training.name)
    return sum(map(processor_seconds, (parent, keeper, training))) - main, main


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    rows: list[Row] = []
    print(f"{'':28}{'step':>9}{'copy':>9}{'share':>8}")
    for name, flags in LAYOUTS.items():
        ranks = run_ranks(2, measure, flags, settings.repeats, timeout=600.0)
        pairs = [pair for rank in ranks for pair in rank]
        step, copy = (statistics.median(values) for values in zip(*pairs, strict=True))
        share = statistics.median(copy / step for step, copy in pairs)
        print(f"{name:28}{1000 * step:6.0f} ms{1000 * copy:6.1f} ms{share:8.1%}", flush=True)
        rows.append(Row(f"{name} copy of the state", copy, "processor s", ratio=share))
    others, training = supervision()
    print(f"supervision: {others:.2%} of a core for each rank, {others / training:.2%} of the time of training")
    rows.append(Row("dp2 supervision", others, "processor s/s", ratio=others / training))
    append("bench_recovery", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
