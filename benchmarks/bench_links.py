"""Measure the cost of the checks of collectives and messages, by the processor time of whole training steps.

Steps without and with recorded checksums alternate on the same ranks; their comparison is included. Printed are the
share of a step that is checked, that share at the default interval, and the share with every pipeline message checked.
Appends to benchmarks/results.csv; ratio there is the share at the interval, or of every message.

python -m benchmarks.bench_links
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro

from benchmarks.bench_checks import SHAPE
from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.resilience.link_checks import LinkChecks
from megatron_core.training.callbacks import Callbacks
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 zero1": (2, ZERO),
    "dp2 zero3, bf16": (2, {"zero_stage": 3, "bf16": True}),
    "tp2 sp, bf16": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "global_batch_size": 8}),
    "ep2": (2, {"num_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2}),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the processor time of steps with and without checks of links."""

    repeats: int = 9
    """Number of pairs of steps, of which the median is reported."""
    interval: int = 100
    """Steps between two checks."""


def measure(layout: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of each kind of step on one rank."""
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    monitors: dict[str, dict[str, Any]] = {
        "none": {"link_check_interval": None},
        "checked": {"link_check_interval": 1},
        "messages": {"link_check_interval": None, "check_pipeline_messages": True},
    }
    run = set_up(RunConfig.from_flat(SHAPE | layout), world)
    kinds = {
        name: RunConfig.from_flat(SHAPE | layout | monitor)
        for name, monitor in monitors.items()
        if name != "messages" or "pipeline_model_parallel_size" in layout
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats + 1):
        for name, config in kinds.items():
            run.config = config
            dist.barrier()
            seconds[name].append(_step(run))
    return {name: values[1:] for name, values in seconds.items()}


def _step(run: Run) -> float:
    """Processor seconds of one step, with its checks."""
    called = Callbacks(run, [LinkChecks(run)])
    with called.running():
        began = time.process_time()
        called.call("before_step")
        result = train_step(run, hooks=called.step_hooks)
        called.call("after_step", result)
        run.data_parallel.finish_param_sync()
        called.call("after_run")
        return time.process_time() - began


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    rows: list[Row] = []
    print(f"{'':18}{'step':>9}{'checked step':>14}{f'every {settings.interval}':>12}{'all messages':>14}")
    for name, (world_size, flags) in LAYOUTS.items():
        ranks = run_ranks(world_size, measure, flags, settings.repeats, timeout=600.0)
        steps = {kind: [sum(pair) for pair in zip(*(rank[kind] for rank in ranks), strict=True)] for kind in ranks[0]}
        usual = statistics.median(steps["none"])
        more = {
            kind: statistics.median(b / a - 1.0 for a, b in zip(steps["none"], values, strict=True))
            for kind, values in steps.items()
        }
        share = more["checked"] / settings.interval
        messages = f"{more['messages']:14.2%}" if "messages" in more else ""
        print(f"{name:18}{1000 * usual:6.0f} ms{more['checked']:14.1%}{share:12.3%}{messages}", flush=True)
        rows.append(Row(f"{name} links checked every {settings.interval} steps", usual, "processor s", ratio=share))
        if "messages" in more:
            rows.append(Row(f"{name} all messages checked", usual, "processor s", ratio=more["messages"]))
    append("bench_links", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
