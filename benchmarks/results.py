"""The table of all measurements, benchmarks/results.csv."""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

COLUMNS = ("date", "benchmark", "contender", "tokens_per_second", "of_peak")
COLUMNS += ("memory_bytes", "ratio", "machine", "versions")
RESULTS = Path(__file__).with_name("results.csv")


def append(benchmark: str, rows: Iterable[Sequence[object]], *, rival: str | None = None) -> None:
    """Add rows, from ``contender`` to ``ratio``, with what they were measured with; ``rival`` as ``NAME VERSION``."""
    machine = f"{platform.machine()}, {platform.system()}, {os.cpu_count()} cores, 1 thread a rank"
    versions = f"python {platform.python_version()}, torch {torch.__version__}" + (f", {rival}" if rival else "")
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([datetime.date.today(), benchmark, *row, machine, versions])
