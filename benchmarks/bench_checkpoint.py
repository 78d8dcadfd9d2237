"""Saving beside ``torch.distributed.checkpoint`` and beside the disk: the same tensors, the same ranks, one run.

Two ranks hold the optimizer state and weights of a model, half each. Contenders take turns: a plain file of the same
bytes with ``fsync`` (the disk's raw rate), this framework with hashes, DCP; then the time for which a step has to wait
while each saves in the background. Medians over the rounds. Prints a table and appends it to benchmarks/results.csv;
``of_peak`` there is the rate to the disk's, ``ratio`` the rate to that of DCP, and of an asynchronous save its stall to
the time of a synchronous one.

    python -m benchmarks.bench_checkpoint
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.results import Row, append
from megatron_core.checkpoint import BackgroundSave, Box, Piece, Save, Snapshot, save_checkpoint
from megatron_core.verify.ranks import run_ranks

RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time saves of two ranks, side by side."""

    parameters: int = 100_000_000
    """Of the model; each is stored as a weight and two moments, in float32."""
    tensors: int = 48
    """Into how many matrices they are divided, for each of the three."""
    rounds: int = 3
    """How often each contender takes its turn."""
    folder: str = ""
    """Where to write; default a new folder among the temporary ones."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of every matrix: rows that the ranks share equally, and columns of 1,024."""
        rows = self.parameters // self.tensors // 1024
        return max(rows // RANKS, 1) * RANKS, 1024

    @property
    def total_bytes(self) -> int:
        """Of a checkpoint."""
        return 3 * self.tensors * self.shape[0] * self.shape[1] * 4


Times = dict[str, list[float]]


class Contenders:
    """What a rank writes, and the ways to write it."""

    def __init__(self, settings: Settings, root: Path) -> None:
        self.rank, self.root, self.number = dist.get_rank(), root, 0
        rows, columns = settings.shape
        own = rows // RANKS
        box = Box((self.rank * own, 0), ((self.rank + 1) * own, columns))
        generator = torch.Generator().manual_seed(self.rank)
        names = [f"{kind}.{i}" for kind in ("model", "exp_avg", "exp_avg_sq") for i in range(settings.tensors)]
        memory = [torch.randn(own, columns, generator=generator) for _ in names]
        self.pieces = [
            Piece(name, (rows, columns), box, part, owned=True) for name, part in zip(names, memory, strict=True)
        ]
        mesh = init_device_mesh("cpu", (RANKS,))
        self.state = {
            name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in zip(names, memory, strict=True)
        }
        self.snapshot = Snapshot()

    def agree(self, ok: bool) -> bool:
        """Whether all ranks are."""
        flag = torch.tensor(int(ok))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def new_save(self) -> Save:
        """The next checkpoint of this framework."""
        self.number += 1
        return Save(self.root / "ours", self.number, {}, rank=self.rank, ranks=RANKS)

    def raw(self) -> None:
        """This rank's bytes, as one file."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"raw{self.rank}").open("wb") as file:
            for piece in self.pieces:
                file.write(piece.memory.view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def ours(self) -> None:
        """A checkpoint of this framework, hashed and on disk."""
        save_checkpoint(self.new_save(), self.pieces, self.agree)

    def theirs(self) -> None:
        """A checkpoint of DCP, on disk; it has no hashes."""
        self.number += 1
        dcp.save(self.state, storage_writer=self.writer())

    def writer(self) -> dcp.FileSystemWriter:
        """DCP's, with its default to sync files."""
        return dcp.FileSystemWriter(self.root / f"dcp{self.number}", single_file_per_rank=True, sync_files=True)

    def ours_in_background(self) -> Callable[[], object]:
        """Begin a checkpoint; -> what waits for it."""
        return BackgroundSave(self.new_save(), self.snapshot.take(self.pieces), self.agree, 600.0).finish

    def theirs_in_background(self) -> Callable[[], object]:
        """Begin a checkpoint of DCP in a thread; -> what waits for it."""
        self.number += 1
        return dcp.async_save(self.state, storage_writer=self.writer()).result

    def clear(self) -> None:
        """Delete what was written."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.root)
            self.root.mkdir()
        dist.barrier()


def measure(settings: Settings, root: Path) -> Times:
    """Seconds of each contender, the slowest rank's; of those in the background, for which the ranks wait."""
    contenders, times = Contenders(settings, root), Times()
    whole = {"raw file": contenders.raw, "ours": contenders.ours, "DCP": contenders.theirs}
    begun = {"ours, async": contenders.ours_in_background, "DCP, async": contenders.theirs_in_background}
    for number in range(settings.rounds + 1):  # the first one warms up
        for name, work in [*whole.items(), *begun.items()]:
            os.sync()
            dist.barrier()
            began = time.perf_counter()
            finish = work()
            seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            if name in begun:
                finish()
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            contenders.clear()
            if number:
                times.setdefault(name, []).append(seconds.item())
    return times


def rows(settings: Settings, times: Times) -> list[Row]:
    """The table."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rate = {name: settings.total_bytes / seconds / 1e6 for name, seconds in medians.items()}
    found = [Row("raw file", rate["raw file"], "MB/s")]
    for name in ("ours", "DCP"):
        ratio = rate["ours"] / rate["DCP"] if name == "ours" else None
        found.append(Row(name, rate[name], "MB/s", of_peak=rate[name] / rate["raw file"], ratio=ratio))
    for name in ("ours", "DCP"):
        found.append(
            Row(f"{name}, async", medians[f"{name}, async"], "s", ratio=medians[f"{name}, async"] / medians[name])
        )
    return found


def main() -> None:
    """Measure, print and append."""
    settings = tyro.cli(Settings, description=__doc__)
    with tempfile.TemporaryDirectory(dir=settings.folder or None) as folder:
        times = run_ranks(RANKS, measure, settings, Path(folder) / "saves", timeout=3600.0, backend="gloo")[0]
    print(f"{settings.total_bytes / 1e6:,.0f} MB on {RANKS} ranks; medians of {settings.rounds}")
    found = rows(settings, times)
    for row in found:
        of_peak = "" if row.of_peak is None else f"  {row.of_peak:.2f} of the disk"
        what = "of a synchronous save" if "async" in row.contender else "of DCP"
        ratio = "" if row.ratio is None else f"  {row.ratio:.3f} {what}"
        spread = f"{min(times[row.contender]):.3f} to {max(times[row.contender]):.3f} s"
        print(f"{row.contender:<12}{row.value:>12,.3f} {row.unit:<5} ({spread}){of_peak}{ratio}")
    append("bench_checkpoint", found, peer=f"torch.distributed.checkpoint {torch.__version__}")


if __name__ == "__main__":
    main()
