"""Measure the cost of run-time checks: seconds of a training step, of a comparison of all copies, and of the check in
the first step.

A GPT of 26 million parameters and the smallest step, one micro-batch per rank, for which the relative cost is highest.
Prints a table and appends it to benchmarks/results.csv; ratio there is the check's share of the time.

python -m benchmarks.bench_checks
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tyro

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.reports.checks import RunChecks
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

SHAPE = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "vocab_size": 2048,
    "micro_batch_size": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "train_iters": 1000,
    "lr": 1e-3,
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "dp2 zero1": (2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of run-time checks and training steps."""

    repeats: int = 7
    """Number of measurements, whose median is reported."""
    interval: int = 100
    """Steps between two comparisons."""


def timed(action: Callable[[], object]) -> float:
    """Seconds of ``action``."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(layout: dict[str, object], repeats: int) -> dict[str, float]:
    """Median seconds on one rank; all ranks start together each time."""
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    run = set_up(RunConfig.from_flat(SHAPE | layout), world)
    checks = RunChecks(run)
    checks.before_run()
    train_step(run)
    actions = {
        "step": lambda: train_step(run),
        "comparison": lambda: checks.replicas.differences(checks.replicas.hashes()),
        "first step": checks.untrained.without_gradient,
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            run.data_parallel.finish_param_sync()
            dist.barrier()
            seconds[name].append(timed(action))
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    rows: list[Row] = []
    print(f"{'':12}{'step':>10}{'comparison':>12}{'of the time':>13}{'first step':>12}")
    for name, (world_size, flags) in LAYOUTS.items():
        ranks = run_ranks(world_size, measure, flags, settings.repeats, timeout=600.0)
        seconds = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        share = seconds["comparison"] / (settings.interval * seconds["step"])
        print(
            f"{name:12}{1000 * seconds['step']:7.0f} ms{1000 * seconds['comparison']:9.1f} ms"
            f"{share:13.4%}{1000 * seconds['first step']:9.1f} ms"
        )
        tokens = world_size * SHAPE["micro_batch_size"] * SHAPE["seq_length"]
        checked = tokens / (seconds["step"] + seconds["comparison"] / settings.interval)
        rows.append(Row(f"{name} compared every {settings.interval} steps", checked, "tokens/s", ratio=share))
    append("bench_checks", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
