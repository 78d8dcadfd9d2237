"""Compare context-parallel ranks on long sequences with one process with the same number of threads.

A ring of 2 ranks with one thread each and one process with two threads alternate in each round; then the peak memory of
a rank at a longer sequence is measured. Prints a table and appends it to benchmarks/results.csv.

python -m benchmarks.bench_context
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tyro

from benchmarks.results import Row, append
from benchmarks.steps import Measured, Turn, time_steps
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

SHAPE = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "vocab_size": 1024,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "train_iters": 1000,
    "lr": 1e-3,
}
CONTENDERS: dict[str, tuple[int, int, dict[str, object]]] = {
    "1 process, 2 threads": (1, 2, {}),
    "cp2 p2p": (2, 1, {"context_parallel_size": 2}),
    "cp2 all_gather": (2, 1, {"context_parallel_size": 2, "cp_comm_type": ("all_gather",)}),
    "cp2 a2a": (2, 1, {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}),
}
IN_MEMORY: dict[str, tuple[int, dict[str, object]]] = {
    "1 process": (1, {}),
    "cp2 p2p": (2, {"context_parallel_size": 2}),
    "cp4 p2p": (4, {"context_parallel_size": 4}),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time training steps on a long sequence, and measure the memory for a longer one."""

    rounds: int = 3
    """Number of rounds."""
    steps: int = 2
    """Timed steps per round, after one warm-up step."""
    length: int = 4096
    """Length of the sequence."""
    memory_length: int = 16384
    """Length of the sequence whose memory is measured; 0: none."""


def train(layout: dict[str, object], length: int, threads: int, steps: int) -> tuple[Turn, int]:
    """One rank: its steps, and its memory before the first step."""
    torch.set_num_threads(threads)
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    run = set_up(RunConfig.from_flat(SHAPE | {"seq_length": length} | layout), world)
    before = resident_bytes()
    return time_steps(lambda: lambda: train_step(run), steps), before


def resident_bytes() -> int:
    """Current memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def measure(settings: Settings) -> dict[str, Measured]:
    """Run all contenders alternately."""
    found: dict[str, Measured] = {}
    for _ in range(settings.rounds):
        for name, (ranks, threads, layout) in CONTENDERS.items():
            results = run_ranks(ranks, train, layout, settings.length, threads, settings.steps, timeout=600.0)
            found.setdefault(name, Measured(ranks, settings.length)).add([turn for turn, _ in results])
    return found


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    found = measure(settings)
    alone = found["1 process, 2 threads"]
    print(f"{settings.length} tokens{'':10}{'tokens/s':>10}{'MiB a rank':>12}{'of 1 process':>14}")
    rows = []
    for name, entry in found.items():
        ratio = statistics.median(alone.seconds) / statistics.median(entry.seconds)
        print(f"{name:22}{entry.tokens_per_second:10.0f}{entry.memory / 2**20:12.0f}{ratio:14.2f}")
        rows.append(Row(name, entry.tokens_per_second, "tokens/s", None, entry.memory, ratio))
    if settings.memory_length:
        print(f"{settings.memory_length} tokens{'':9}{'MiB a rank':>12}{'of them in a step':>19}")
        for name, (ranks, layout) in IN_MEMORY.items():
            results = run_ranks(ranks, train, layout, settings.memory_length, 1, 0, timeout=600.0)
            peak = max(turn.memory for turn, _ in results)
            step = max(turn.memory - before for turn, before in results)
            print(f"{name:22}{peak / 2**20:12.0f}{step / 2**20:19.0f}")
            rows.append(Row(f"{name}, {settings.memory_length} tokens", step / 2**20, "MiB in a step", None, peak))
    append("bench_context", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
