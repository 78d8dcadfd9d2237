"""Compare the start of ranks by ``--nproc-per-node`` with torchrun: seconds of a training of one step.

Both run in turns. Prints a table and appends it to benchmarks/results.csv; ratio there is torchrun's time divided by
ours.

python -m benchmarks.bench_start
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.results import Row, append

ROOT = Path(__file__).resolve().parents[1]
FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 --mock-data "
    "--train-iters 1 --micro-batch-size 1"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare two ways to start ranks."""

    ranks: int = 4
    """Number of ranks."""
    repeats: int = 5
    """Number of measurements, whose median is reported."""


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall-clock time and processor time of a command with all its processes."""
    began, before = time.monotonic(), os.times()
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - began, used


def main() -> None:
    """Measure both and print the medians."""
    settings = tyro.cli(Settings, description=__doc__)
    number = ["--nproc-per-node", str(settings.ranks)]
    commands = {
        "ours": [sys.executable, "pretrain_gpt.py", *number, *FLAGS.split()],
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(*number, "pretrain_gpt.py", *FLAGS.split()),
        ],
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(settings.repeats):
        for name, command in commands.items():
            found[name].append(seconds(command))
    rows = []
    for at, kind in enumerate(("", ", processor time")):
        median = {name: statistics.median(pair[at] for pair in pairs) for name, pairs in found.items()}
        for name, value in median.items():
            ratio = median["torchrun"] / median["ours"] if name == "ours" else None
            rows.append(Row(f"{settings.ranks} ranks, {name}{kind}", value, "s", ratio=ratio))
            print(f"{rows[-1].contender:34} {value:6.2f} s" + (f"  {ratio:.2f}" if ratio else ""))
    append("bench_start", rows)


if __name__ == "__main__":
    main()
