"""Measure the cost of equal bits: steps with and without --layout-invariant, by processor time.

Both alternate in each round, in the same ranks. Prints a table and appends it to benchmarks/results.csv.

python -m benchmarks.bench_invariance
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tyro

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

SHAPE: dict[str, object] = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "ffn_hidden_size": 1536,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "vocab_size": 8192,
    "seq_length": 512,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "train_iters": 1000,
    "lr": 1e-3,
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time training steps with and without equal bits."""

    rounds: int = 5
    """Number of rounds, of one step each way."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Dtypes of the activations."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """Layouts to measure."""


def train(layout: dict[str, object], dtype: str, rounds: int) -> tuple[list[float], list[float]]:
    """One rank: seconds of processor time of its steps without and with equal bits, after one step each."""
    torch.set_num_threads(1)
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    shape = SHAPE | {"bf16": dtype == "bfloat16"} | layout
    runs = [set_up(RunConfig.from_flat(shape | {"layout_invariant": on}), world) for on in (False, True)]
    for run in runs:
        train_step(run)
    times = [[_seconds(run) for run in runs] for _ in range(rounds)]
    return [off for off, _ in times], [on for _, on in times]


def _seconds(run: Run) -> float:
    began = time.process_time()
    train_step(run)
    return time.process_time() - began


def main(settings: Settings) -> None:
    """Run the benchmark."""
    rows = []
    for dtype in settings.dtypes:
        for name in settings.layouts:
            world_size, layout = LAYOUTS[name]
            ranks = run_ranks(world_size, train, layout, dtype, settings.rounds, timeout=900)
            off, on = (sum(statistics.median(rank[way]) for rank in ranks) for way in (0, 1))
            print(f"{dtype} {name}: {off:.2f} s, with equal bits {on:.2f} s: {on / off:.2f} times", flush=True)
            rows.append(Row(f"{name} {dtype}, equal bits", on, "s", ratio=on / off))
    append("bench_invariance", rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, args=sys.argv[1:]))
