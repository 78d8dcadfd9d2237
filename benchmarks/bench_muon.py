"""Measure training steps with Muon: seconds, processor seconds of a rank, bytes it sends, FLOPs of its updates.

With ``--before CHECKOUT``, steps of another version of this repository alternate with those of this one, in processes
of their own; ``ratio`` in benchmarks/results.csv is then the time relative to that version. One thread per rank.

python -m benchmarks.bench_muon --before /path/to/checkout
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.reports.meter import METER
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

SHAPE: dict[str, object] = {
    "num_layers": 4,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "seq_length": 256,
    "vocab_size": 2048,
    "micro_batch_size": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "train_iters": 1000,
    "optimizer": "muon",
    "lr": 1e-3,
    "ddp_bucket_size": 2_000_000,
}
EXPERTS: dict[str, object] = {
    "num_layers": 2,
    "num_experts": 8,
    "moe_ffn_hidden_size": 384,
    "swiglu": True,
    "disable_bias_linear": True,
    "moe_aux_loss_coeff": 0.01,
    "expert_model_parallel_size": 2,
}
OVERLAP: dict[str, object] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CONTENDERS: dict[str, tuple[int, dict[str, object]]] = {
    "dp1": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "dp2": (2, {}),
    "dp2 zero1": (2, {"zero_stage": 1} | OVERLAP),
    "dp2 zero1 cut": (2, {"zero_stage": 1, "use_layer_wise_param_layout": False} | OVERLAP),
    "dp2 zero3": (2, {"zero_stage": 3} | OVERLAP),
    "dp2 ep2 zero1": (2, EXPERTS | {"zero_stage": 1} | OVERLAP),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure training steps with Muon."""

    before: Path | None = None
    """Checkout of another version."""
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """The layouts."""
    rounds: int = 3
    """Number of rounds."""
    steps: int = 3
    """Timed steps per round, after one warm-up step."""
    samples: int = 4
    """Samples per step."""
    keep: bool = True
    """Append to benchmarks/results.csv."""
    worker: str | None = None
    """Measure this contender in this process and print JSON; set by the program itself."""


def one_rank(flags: dict[str, object], settings: Settings) -> dict[str, Any]:
    """Return the seconds of each step of this rank; then measure the traffic of a step, and the FLOPs of an update."""
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    run = set_up(RunConfig.from_flat(SHAPE | {"global_batch_size": settings.samples} | flags), world)
    train_step(run)
    seconds, processor = [], []
    for _ in range(settings.steps):
        began, began_processor = time.perf_counter(), time.process_time()
        train_step(run)
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - began_processor)
    update, flops, sent = run.optimizer.step, FlopCounterMode(display=False), [0.0, 0.0]

    def measured(*args: Any, **options: Any) -> bool:
        sent[0] += _bytes()
        with flops:
            skipped: bool = update(*args, **options)
        sent[1] += _bytes()
        return skipped

    run.optimizer.step = measured  # type: ignore[method-assign]
    METER.start(run.groups, world.device)
    train_step(run)
    sent[0] += _bytes()
    METER.stop()
    totals = {"bytes": sum(sent), "update bytes": sent[1], "flops": flops.get_total_flops()}
    return {"seconds": seconds, "processor": processor, **totals}


def _bytes() -> float:
    return sum(traffic.bytes for traffic in METER.take().traffic.values())


def measure_here(name: str, settings: Settings) -> None:
    """Print the measurements of all ranks as JSON."""
    ranks, flags = CONTENDERS[name]
    print("\n" + json.dumps(run_ranks(ranks, one_rank, flags, settings)))


def measure(name: str, checkout: Path, settings: Settings) -> list[dict[str, Any]]:
    """Run a contender in a process of its own, with the modules of ``checkout``."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name]
    command += ["--steps", str(settings.steps), "--samples", str(settings.samples)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def slowest(rounds: list[list[dict[str, Any]]], kind: str) -> float:
    """Return the median step, each of its slowest rank."""
    return statistics.median(max(step) for ranks in rounds for step in zip(*(r[kind] for r in ranks), strict=True))


def main(settings: Settings) -> None:
    """Measure all contenders in turn and print the table."""
    if settings.worker is not None:
        measure_here(settings.worker, settings)
        return
    versions = {"": Path(__file__).resolve().parents[1]}
    versions |= {" before": settings.before.resolve()} if settings.before is not None else {}
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for _ in range(settings.rounds):
        for name in settings.contenders:
            for suffix, checkout in versions.items():
                found.setdefault(name + suffix, []).append(measure(name, checkout, settings))
                print(f"{name + suffix}: {min(found[name + suffix][-1][0]['seconds']):.3f} s", flush=True)
    rows = []
    print(f"{'':20} {'s':>7} {'ratio':>6} {'cpu s':>7} {'ratio':>6} {'MB sent':>9} {'in update':>9} {'GFLOP':>9}")
    for name, rounds in found.items():
        peer, kinds = found.get(f"{name} before"), ("seconds", "processor")
        times = [slowest(rounds, kind) for kind in kinds]
        ratios = [None if peer is None else own / slowest(peer, kind) for own, kind in zip(times, kinds, strict=True)]
        sent, update, flops = (max(rank[key] for rank in rounds[-1]) for key in ("bytes", "update bytes", "flops"))
        cells = " ".join(f"{own:7.3f} {ratio or 1.0:6.3f}" for own, ratio in zip(times, ratios, strict=True))
        print(f"{name:20} {cells} {sent / 1e6:9.2f} {update / 1e6:9.2f} {flops / 1e9:9.2f}", flush=True)
        rows.append(Row(f"muon {name}", times[0], "s", ratio=ratios[0]))
        rows.append(Row(f"muon {name}, processor time of a rank", times[1], "s", ratio=ratios[1]))
        rows.append(Row(f"muon {name}, sent by a rank", sent / 1e6, "MB"))
        rows.append(Row(f"muon {name}, update of a rank", flops / 1e9, "GFLOP"))
    if settings.keep:
        append("bench_muon", rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
