"""Compare collectives between CPU ranks of one host over shared memory and over gloo.

Both alternate in one run; the time of a call is that of its slowest rank. The table has the median and the 10th
percentile, which other programs affect less; the medians are appended to benchmarks/results.csv.

python -m benchmarks.bench_collectives
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
from megatron_core.parallel.collectives import all_gather_flat_, reduce_scatter_flat_
from megatron_core.verify.ranks import run_ranks


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time collectives."""

    ranks: int = 2
    """Number of ranks; they may share cores."""
    kib: tuple[int, ...] = (4, 64, 512, 4096)
    """Sizes of each rank's input."""
    calls: int = 40
    """Timed calls of each collective and size per round."""
    rounds: int = 3
    """Number of rounds."""


def operations(size: int, ranks: int) -> dict[str, Callable[[], object]]:
    """Collectives on float32 tensors of ``size`` bytes."""
    x = torch.ones(size // 4)
    whole, part = torch.empty(len(x) * ranks), torch.empty(len(x) // ranks)
    rank, world = dist.get_rank(), dist.group.WORLD

    def message() -> None:
        if rank % 2 == 0 and rank + 1 < ranks:
            dist.send(x, rank + 1)
            dist.recv(x, rank + 1)
        elif rank % 2:
            dist.recv(x, rank - 1)
            dist.send(x, rank - 1)

    return {
        "all-reduce": lambda: dist.all_reduce(x.fill_(1.0)),
        "all-gather": lambda: all_gather_flat_(whole, x, world),
        "reduce-scatter": lambda: reduce_scatter_flat_(part, x, world),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "there and back": message,
    }


def times(settings: Settings) -> dict[tuple[str, int], list[float]]:
    """Seconds of each call on this rank."""
    found: dict[tuple[str, int], list[float]] = {}
    for kib in settings.kib:
        for name, call in operations(kib * 1024, settings.ranks).items():
            call()
            dist.barrier()
            own = found.setdefault((name, kib), [])
            for _ in range(settings.calls):
                began = time.perf_counter()
                call()
                own.append(time.perf_counter() - began)
    return found


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    found: dict[str, dict[tuple[str, int], list[float]]] = {"gloo": {}, "shm": {}}
    for _ in range(settings.rounds):
        for backend, seconds in found.items():
            ranks = run_ranks(settings.ranks, times, settings, backend=backend, timeout=600.0)
            for key in ranks[0]:
                seconds.setdefault(key, []).extend(map(max, zip(*(rank[key] for rank in ranks), strict=True)))
    print(f"microseconds, {settings.ranks} ranks")
    print(f"{'':16}{'KiB':>7}{'median: gloo':>14}{'shm':>8}{'ratio':>7}{'tenth: gloo':>14}{'shm':>8}{'ratio':>7}")
    rows = []
    for name, kib in found["gloo"]:
        tenths = [statistics.quantiles(found[backend][name, kib], n=10) for backend in ("gloo", "shm")]
        (early, gloo), (shm_early, shm) = ((1e6 * each[0], 1e6 * each[4]) for each in tenths)
        print(f"{name:16}{kib:7}{gloo:14.0f}{shm:8.0f}{gloo / shm:7.1f}", end="")
        print(f"{early:14.0f}{shm_early:8.0f}{early / shm_early:7.1f}")
        rows.append(Row(f"{name} {kib} KiB, {settings.ranks} ranks", shm, "us", ratio=gloo / shm))
    append("bench_collectives", rows, peer=f"gloo of torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
