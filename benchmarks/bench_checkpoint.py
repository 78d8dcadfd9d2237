"""Compare saving and loading with ``torch.distributed.checkpoint`` and with the disk, and measure the effect of saves
on training.

Two data-parallel ranks train a GPT, each with half of the optimizer state and weights. Contenders alternate: a plain
file of the same bytes with ``fsync`` (the disk's raw rate), this framework with hashes, DCP; then a few steps with
and without a save in the background, and DCP in the background. A stored checkpoint is read as plain files by the
ranks that wrote them, and loaded with its hashes into the two replicas, each time from the disk and not from the page
cache; ``ratio`` of the load is its time relative to that of reading the bytes. Medians over the rounds. Prints a
table and appends it to benchmarks/results.csv; ``of_peak`` there is the rate relative to the disk, ``ratio`` the rate
relative to DCP; for an asynchronous save the delay of the steps relative to the time of a synchronous save; for
periodic saves the overhead of the steps in wall time and in CPU time of a rank, over all of its threads, which other
programs do not affect.

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
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro

from benchmarks.results import Row, append
from megatron_core.checkpoint import Save, open_newest, save_checkpoint
from megatron_core.checkpoint.folder import iteration_folder, rank_file
from megatron_core.checkpoint.hashes import READ_BYTES
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.reports.checks import RunChecks
from megatron_core.resilience.state_copies import held_pieces
from megatron_core.training.setup import set_up
from megatron_core.training.state import CPU, other_pieces, updated_pieces
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

RANKS = 2
SAVES = ("", " and a save")
"""Contenders that are timed with training steps."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of saves on two ranks."""

    num_layers: int = 12
    """Width of the model, which has 85 million parameters in its layers,"""
    vocab_size: int = 16384
    """and 13 million in its embeddings; each is stored as a weight and two moments, in float32."""
    seq_length: int = 256
    """Tokens of a rank per step."""
    steps: int = 4
    """Timed steps with and without a preceding save; the save must be complete at their end."""
    interval: int = 50
    """Steps between two saves, for the reported overhead."""
    rounds: int = 3
    """Number of rounds."""
    folder: str = ""
    """Folder to write to; default: a new temporary folder."""


Times = dict[str, list[float]]
"""Seconds by contender; bytes of the checkpoint of all ranks as ``bytes``."""


class Contenders:
    """A training run and the ways to save it."""

    def __init__(self, settings: Settings, root: Path) -> None:
        self.rank, self.root, self.number, self.steps = dist.get_rank(), root, 0, settings.steps
        shape = {
            "num_layers": settings.num_layers,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "vocab_size": settings.vocab_size,
            "seq_length": settings.seq_length,
            "micro_batch_size": 1,
            "global_batch_size": RANKS,
        }
        job = {"mock_data": True, "train_iters": 10**6, "use_distributed_optimizer": True}
        flags = shape | job | {"save": str(root / "async"), "async_save": True, "keep_last": 1}
        self.run = set_up(RunConfig.from_flat(flags), World(self.rank, RANKS, 0, torch.device("cpu")))
        self.checks = RunChecks(self.run)
        data, optimizer = self.run.data_parallel, self.run.optimizer
        found = chain(updated_pieces(data, optimizer), other_pieces(data, optimizer, None))
        self.pieces = [piece for piece in found if piece.owned]
        self.state = {f"{self.rank}.{piece.name}": piece.memory for piece in self.pieces}

    def store(self) -> None:
        """Save the checkpoint that is read in each round."""
        save_checkpoint(Save(self.root / "stored", 1, {}, rank=self.rank, ranks=RANKS), self.pieces, self.agree)

    def forget(self) -> None:
        """Drop this rank's file of the stored checkpoint from the page cache."""
        with self.own_file.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def own_file(self) -> Path:
        """This rank's file of the stored checkpoint."""
        return iteration_folder(self.root / "stored", 1) / rank_file(self.rank)

    def read(self) -> None:
        """Read the bytes of this rank's file."""
        buffer = bytearray(READ_BYTES)
        with self.own_file.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def load(self) -> None:
        """Load weights and optimizer state, and compare hashes."""
        reader = open_newest(str(self.root / "stored"), None, hash_later=True, device=CPU)
        assert reader is not None
        with reader:
            reader.fill_together(held_pieces(self.run.data_parallel, self.run.optimizer), CPU)

    def agree(self, ok: bool) -> bool:
        """Whether the condition is true on all ranks."""
        flag = torch.tensor(int(ok))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def raw(self) -> None:
        """Write this rank's bytes as one file."""
        with (self.root / f"raw{self.rank}").open("wb") as file:
            for piece in self.pieces:
                file.write(piece.memory.view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())

    def ours(self) -> None:
        """Save a checkpoint of this framework, hashed and on disk."""
        save_checkpoint(Save(self.root / "ours", 1, {}, rank=self.rank, ranks=RANKS), self.pieces, self.agree)

    def theirs(self) -> None:
        """Save a checkpoint of DCP, on disk; it has no hashes."""
        dcp.save(self.state, storage_writer=self.writer())

    def theirs_in_background(self) -> Callable[[], object]:
        """Start a checkpoint of DCP in a thread; returns the function that waits for it."""
        return dcp.async_save(self.state, storage_writer=self.writer()).result

    def writer(self) -> dcp.FileSystemWriter:
        """DCP's writer, with its default to sync files."""
        self.number += 1
        return dcp.FileSystemWriter(self.root / f"dcp{self.number}", single_file_per_rank=True, sync_files=True)

    def train(self) -> None:
        """Run a few steps."""
        for _ in range(self.steps):
            train_step(self.run)

    def train_and_save(self) -> float:
        """Run steps after starting a save as the training loop does; returns the seconds that they waited for it."""
        run, waited = self.run, 0.0
        self.checks.compare()
        began = time.perf_counter()
        run.saver.save(run.state)
        waited += time.perf_counter() - began
        wait = run.optimizer.before_update

        def timed() -> None:
            nonlocal waited
            began = time.perf_counter()
            wait()
            waited += time.perf_counter() - began

        run.optimizer.before_update = timed
        self.train()
        run.saver.finish()
        return waited

    def clear(self) -> None:
        """Delete the written files."""
        dist.barrier()
        if self.rank == 0:
            for path in [*self.root.glob("dcp*"), self.root / "ours"]:
                shutil.rmtree(path, ignore_errors=True)
        dist.barrier()


def measure(settings: Settings, root: Path) -> Times:
    """Seconds of each contender, of the slowest rank."""
    contenders = Contenders(settings, root)
    size = torch.tensor([sum(piece.memory.nbytes for piece in contenders.pieces)])
    dist.all_reduce(size)
    times: Times = {"bytes": [float(size)]}
    works: dict[str, Callable[[], object]] = {
        "raw file": contenders.raw,
        "ours": contenders.ours,
        "DCP": contenders.theirs,
        "steps": contenders.train,
        # After the steps, in which the disk completes earlier writes; the first read fills caches outside this system.
        "first read": contenders.read,
        "read": contenders.read,
        "load": contenders.load,
        "steps and a save": contenders.train_and_save,
        "DCP, async": contenders.theirs_in_background,
    }
    contenders.store()
    for number in range(settings.rounds + 1):  # warm-up
        for name, work in works.items():
            os.sync()
            contenders.forget()
            dist.barrier()
            began, computed = time.perf_counter(), time.process_time()
            result = work()
            spent = {name: time.perf_counter() - began, f"{name}, CPU": time.process_time() - computed}
            if isinstance(result, float):
                spent["ours, async"] = result
            elif callable(result):
                result()
            for each, own in spent.items():
                seconds = torch.tensor(own, dtype=torch.float64)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if number:
                    times.setdefault(each, []).append(seconds.item())
            contenders.clear()
    return times


def rows(settings: Settings, times: Times) -> list[Row]:
    """The table."""
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rate = {name: medians["bytes"] / medians[name] / 1e6 for name in ("raw file", "ours", "DCP")}
    found = [Row("raw file", rate["raw file"], "MB/s")]
    for name in ("ours", "DCP"):
        ratio = rate["ours"] / rate["DCP"] if name == "ours" else None
        found.append(Row(name, rate[name], "MB/s", of_peak=rate[name] / rate["raw file"], ratio=ratio))
    read, load = (medians["bytes"] / medians[name] / 1e6 for name in ("read", "load"))
    found.append(Row("read", read, "MB/s"))
    found.append(Row("load", load, "MB/s", of_peak=load / read, ratio=medians["load"] / medians["read"]))
    for name in ("ours", "DCP"):
        waited = medians[f"{name}, async"]
        found.append(Row(f"{name}, async", waited, "s", ratio=waited / medians[name]))
    for clock in ("", ", CPU"):
        step, pairs = medians["steps" + clock] / settings.steps, (times[f"steps{end}{clock}"] for end in SAVES)
        added = statistics.median(b - a for a, b in zip(*pairs, strict=True))
        found.append(Row(f"step{clock}", step, "s"))
        name = f"save every {settings.interval} steps{clock}"
        found.append(Row(name, added, "s", ratio=added / (settings.interval * step)))
    return found


def main() -> None:
    """Measure, print and append."""
    settings = tyro.cli(Settings, description=__doc__)
    with tempfile.TemporaryDirectory(dir=settings.folder or None) as folder:
        times = run_ranks(RANKS, measure, settings, Path(folder), timeout=3600.0, backend="gloo")[0]
    print(f"{times['bytes'][0] / 1e6:,.0f} MB on {RANKS} ranks; medians of {settings.rounds}")
    found = rows(settings, times)
    for row in found:
        of_peak = "" if row.of_peak is None else f"  {row.of_peak:.2f} of the disk"
        what = {"MB/s": "of DCP"}.get(row.unit, "of a synchronous save" if "async" in row.contender else "of the steps")
        what = "of the time of reading the bytes" if row.contender == "load" else what
        ratio = "" if row.ratio is None else f"  {row.ratio:.4f} {what}"
        seconds = times.get(row.contender, [])
        spread = f"  ({min(seconds):.3f} to {max(seconds):.3f} s)" if seconds else ""
        print(f"{row.contender:<20}{row.value:>12,.3f} {row.unit:<5}{of_peak}{ratio}{spread}")
    append("bench_checkpoint", found, peer=f"torch.distributed.checkpoint {torch.__version__}")


if __name__ == "__main__":
    main()
