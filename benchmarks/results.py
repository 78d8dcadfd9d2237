"""The table of all measurements, benchmarks/results.csv."""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

RESULTS = Path(__file__).with_name("results.csv")


@dataclass(frozen=True)
class Row:
    """One measurement."""

    contender: str
    value: float
    unit: str
    """Unit of ``value``: tokens/s, MB/s, s."""
    of_peak: float | None = None
    """``value`` relative to the machine's limit."""
    memory_bytes: int | None = None
    """The largest peak of a process."""
    ratio: float | None = None
    """``value`` relative to the peer's, or as described by the benchmark."""


def append(benchmark: str, rows: Iterable[Row], *, peer: str | None = None, device: str | None = None) -> None:
    """Add rows with the environment of the measurement; ``peer`` as ``NAME VERSION``, ``device`` the GPU's name."""
    processor = f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"
    machine = f"{processor}, {platform.system()}, {os.cpu_count()} cores, {device or '1 thread a rank'}"
    versions = f"python {platform.python_version()}, torch {torch.__version__}" + (f", {peer}" if peer else "")
    columns = ("date", "benchmark", *(field.name for field in fields(Row)), "machine", "versions")
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(columns)
        for row in rows:
            cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in astuple(row))
            writer.writerow([datetime.date.today(), benchmark, *cells, machine, versions])
