"""Kill random ranks of a job at random times, restart it as torchrun would, and check the checkpoints.

python -m tests.checkpoint.chaos --kills 1000 --out runs/chaos.json

One kind of job saves only in the memory of two hosts, one of which is lost with every kill. After every kill the newest
checkpoint must be intact, by the hashes of all its files, and not older than the previous one; the final weights and
optimizer state must be bitwise equal to those of an undisturbed job.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
import tyro

from megatron_core.checkpoint import CheckpointReader, find_checkpoint
from megatron_core.planner.layout import Layout
from megatron_core.training.loop import train
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.checkpoint.runs import start, stored

STEPS = 8
JOB = {"num_layers": 2, "train_iters": STEPS, "save_interval": 1, "eval_iters": 0, "hidden_dropout": 0.1}
# Layouts and their checkpoint settings.
CASES: dict[str, dict[str, object]] = {
    "dp2 zero1": {"async_save": True, "keep_last": 2},
    "tp2": {},
    "dp2 zero3": {"async_save": True},
    "pp2 dp2 zero1": {"async_save": True, "keep_last": 1},
    "dp2 zero2": {"non_persistent_ckpt_type": "local", "non_persistent_save_interval": 1, "replication": True},
}
LOST = "memory1"
"""Memory of the second host, for jobs that save there."""


@dataclass
class Seen:
    """Results of a series of kills."""

    kills: int = 0
    runs: int = 0
    """Number of complete jobs that are bitwise equal to undisturbed ones."""
    while_saving: int = 0
    """Number of kills that left an incomplete checkpoint under its temporary name."""
    newest_after_kill: dict[int, int] = field(default_factory=dict)
    """How often each iteration was found; 0: no complete checkpoint yet."""


def _job(case: str, root: Path, victim: int | None, seconds: float) -> None:
    """A rank of the job; the ``victim`` kills itself after ``seconds``."""
    if victim == dist.get_rank():
        Thread(target=_die_after, args=(seconds,), daemon=True).start()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        folder: dict[str, object] = {"save": str(root), "load": str(root)}
        if in_memory(case):
            memory = str(root / f"memory{dist.get_rank()}")
            folder |= {"save_interval": None, "non_persistent_local_ckpt_dir": memory}
        run = start(JOB | CASES[case] | Layout.parse(case).settings() | folder)
        run.saver.open()
        train(run, [])


def in_memory(case: str) -> bool:
    """Whether jobs of ``case`` save in the memory of their hosts, of one rank each."""
    return "replication" in CASES[case]


def _die_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _newest(root: Path) -> int:
    """The iteration of the newest checkpoint, whose files must be intact; 0 if there is none."""
    folder = find_checkpoint(str(root))
    if folder is None:
        return 0
    with CheckpointReader(folder) as reader:
        faults = reader.verify()
        assert not faults, faults
        return reader.manifest.iteration


def survive(case: str, root: Path, kills: int, chance: random.Random, seen: Seen) -> None:
    """Kill ranks of jobs of ``case`` the given number of times, then complete the last job. ``AssertionError`` on any
    loss."""
    size, alone = Layout.parse(case).world_size, root / "alone"
    began = time.monotonic()
    run_ranks(size, _job, case, alone, None, 0.0)
    longest, expected = time.monotonic() - began, stored(alone / f"iter_{STEPS:07d}")
    left, number = kills, 0
    while left:
        folder, before, ended, number = root / f"job{number}", 0, False, number + 1
        while not ended:
            victim = chance.randrange(size) if left else None
            try:
                run_ranks(size, _job, case, folder, victim, chance.uniform(0.0, longest))
                ended = True
            except RankFailure as failure:
                if victim is None or not re.search(r"exited without a result|[Cc]onnection|has left", str(failure)):
                    raise
                left, seen.kills = left - 1, seen.kills + 1
                shutil.rmtree(folder / LOST, ignore_errors=True)
            newest = _newest(folder / "memory0" if in_memory(case) else folder)
            assert newest >= before, f"{case}: iteration {before} was complete, now the newest is {newest}"
            if not ended:
                seen.while_saving += any(folder.rglob(".iter_*.incomplete"))
                seen.newest_after_kill[newest] = 1 + seen.newest_after_kill.get(newest, 0)
            before = newest
        found = stored(folder / f"iter_{STEPS:07d}")
        assert found.keys() == expected.keys()
        unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not unequal, f"{case}: {unequal} differ from the job that was left alone"
        seen.runs += 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Kill random ranks at random times, and write the results."""

    kills: int = 1000
    """Total number of kills over all layouts."""
    seed: int = 0
    """Seed for layouts, ranks and times."""
    out: str = "runs/chaos.json"
    """File to write."""


def main() -> None:
    """Use all layouts in turn, ten kills at a time."""
    settings = tyro.cli(Settings, description=__doc__)
    chance, seen = random.Random(settings.seed), {case: Seen() for case in CASES}
    Path(settings.out).parent.mkdir(parents=True, exist_ok=True)
    while (left := settings.kills - sum(one.kills for one in seen.values())) > 0:
        case = min(CASES, key=lambda name: seen[name].kills)
        with tempfile.TemporaryDirectory() as folder:
            survive(case, Path(folder), min(left, 10), chance, seen[case])
        Path(settings.out).write_text(json.dumps({name: asdict(one) for name, one in seen.items()}, indent=1) + "\n")
        print(f"{settings.kills - left + min(left, 10)} kills survived", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
