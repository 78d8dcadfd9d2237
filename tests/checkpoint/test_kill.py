"""Saved files do not change, and a job killed during a save leaves no incomplete checkpoint."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from megatron_core.checkpoint import find_checkpoint
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.checkpoint.chaos import Seen, survive
from tests.checkpoint.runs import compare, pieces, save_run, start, stored, train

SETTINGS = {"num_layers": 1, "use_distributed_optimizer": True}


def _spoil_after_saving(root: Path) -> None:
    run = start(SETTINGS | {"save": str(root)})
    train(run, 2)
    saved = {(piece.name, piece.box): piece.memory.clone() for piece in pieces(run)}
    folder = save_run(run)
    for bucket in run.data_parallel.buckets:
        bucket.weights.fill_(torch.nan)
    for piece in pieces(run):
        piece.memory.fill_(torch.nan)
    dist.barrier()
    tensors = stored(folder)
    for (name, box), values in saved.items():
        where = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        assert torch.equal(tensors[name][where], values), name


def test_weights_that_change_after_the_save_do_not_change_the_file(tmp_path: Path) -> None:  # C44
    run_ranks(2, _spoil_after_saving, tmp_path)


def _save_until_killed(root: Path, seconds: float) -> None:
    """Both ranks save after every step; shortly after the first checkpoint each kills itself, not exactly together."""
    run = start(SETTINGS | {"save": str(root), "train_iters": 10**6})
    train(run, 1)
    save_run(run)
    Thread(target=_die_after, args=(seconds * (1 + dist.get_rank()),), daemon=True).start()
    while True:
        train(run, 1)
        save_run(run)


def _die_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _load(root: Path) -> int:
    run = start(SETTINGS | {"load": str(root)})
    folder = find_checkpoint(str(root))
    assert folder.name == f"iter_{run.state.iteration:07d}"
    seen = compare(run, stored(folder))
    assert {name.split(".")[0] for name in seen} == {"model", "optimizer"}
    train(run, 1)
    return run.state.iteration


@pytest.mark.parametrize("seed", range(3))
def test_job_that_was_killed_while_saving_goes_on(seed: int, tmp_path: Path) -> None:  # C44 C57
    with pytest.raises(RankFailure, match=r"exited without a result|[Cc]onnection"):
        run_ranks(2, _save_until_killed, tmp_path, 0.05 + 0.1 * random.Random(seed).random())
    first, second = run_ranks(2, _load, tmp_path)
    assert first == second >= 2


def test_kills_of_any_rank_at_any_moment_lose_nothing(tmp_path: Path) -> None:  # C44 C57 C61
    """A few kills of ``make chaos``: intact checkpoints after each, and bitwise equal results at the end."""
    seen = Seen()
    survive("dp2 zero1", tmp_path, 3, random.Random(3), seen)
    assert seen.kills == 3 == sum(seen.newest_after_kill.values()) and seen.runs >= 1
