"""Saving during training, retention of checkpoints, and exclusive access to the folder."""

from __future__ import annotations

import io
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.checkpoint import find_checkpoint, writer
from megatron_core.checkpoint.folder import complete_iterations
from megatron_core.config import RunConfig
from megatron_core.config.ranges import FILE, FOLDER
from megatron_core.config.run import settings
from megatron_core.config.validate import problems
from megatron_core.errors import CheckpointError
from megatron_core.parallel import World
from megatron_core.training import pretrain
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.checkpoint.runs import SMALL, compare, edit, save_run, start, stored, train
from tests.defects.plant import planted

TRACKER = "latest_checkpointed_iteration.txt"
TWO = {"num_layers": 1, "use_distributed_optimizer": True}
JOB = SMALL | {"num_layers": 1, "eval_iters": 0}


@pytest.fixture(autouse=True)
def _no_layout_stays() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def job(settings: dict) -> None:
    pretrain(RunConfig.from_flat(JOB | settings), World(0, 1, 0, torch.device("cpu")))


def _hold_writes() -> Event:
    """Block the writing of tensors on all ranks until the event is set."""
    go, write = Event(), writer.write_safetensors

    def held(*args: object) -> object:
        assert go.wait(60)
        return write(*args)

    writer.write_safetensors = held
    return go


# --- In the background.


def _save_both_ways(root: Path) -> None:
    """The same step saved synchronously, and in the background while two more steps change every weight."""
    for name, in_background in (("sync", False), ("async", True)):
        run = start(TWO | {"save": str(root / name), "async_save": in_background})
        train(run, 2)
        if not in_background:
            save_run(run)
            continue
        go = _hold_writes()
        folder = save_run(run)
        train(run, 2)
        assert find_checkpoint(str(root / name)) is None, "nothing is complete yet"
        go.set()
        run.saver.finish()
        assert find_checkpoint(str(root / name)) == folder


def _same(one: Path, other: Path) -> None:
    first, second = stored(one / "iter_0000002"), stored(other / "iter_0000002")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_background_save_has_the_bits_of_its_step(tmp_path: Path) -> None:  # C44
    run_ranks(2, _save_both_ways, tmp_path)
    _same(tmp_path / "sync", tmp_path / "async")


def test_a_snapshot_that_is_no_copy_is_noticed(tmp_path: Path) -> None:
    fragment = "memory=room.view(piece.memory.dtype).view(piece.memory.shape)"
    with planted("features.background_saves.snapshot:Snapshot.take", fragment, "memory=piece.memory"):
        run_ranks(2, _save_both_ways, tmp_path)
    with pytest.raises(AssertionError):
        _same(tmp_path / "sync", tmp_path / "async")


def _die_while_writing(root: Path) -> None:
    """The first checkpoint is complete; of the second, rank 0 writes its part and rank 1 is killed before its own."""
    run = start(TWO | {"save": str(root), "async_save": True})
    train(run, 1)
    save_run(run)
    train(run, 1)
    run.saver.finish()
    if dist.get_rank() == 1:
        _hold_writes()
    save_run(run)
    train(run, 1)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.saver.finish()


def _resume(root: Path, iteration: int) -> None:
    run = start(TWO | {"load": str(root)})
    assert run.state.iteration == iteration
    compare(run, stored(root / f"iter_{iteration:07d}"))


def test_killed_in_the_middle_the_one_before_is_whole(tmp_path: Path) -> None:  # C44 C57
    with pytest.raises(RankFailure, match=r"exited without a result|[Cc]onnection|left"):
        run_ranks(2, _die_while_writing, tmp_path)
    assert (tmp_path / ".iter_0000002.incomplete").is_dir()
    run_ranks(2, _resume, tmp_path, 1)


def _fill_the_disk(root: Path) -> None:
    """A limit on file sizes interrupts one rank's writing, like a full disk."""
    run = start(TWO | {"save": str(root), "async_save": True})
    train(run, 1)
    assert run.saver.try_to_save(run.state)
    train(run, 1)
    run.saver.finish()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    assert run.saver.try_to_save(run.state), "it has begun"
    train(run, 1)
    with pytest.raises(CheckpointError, match="a rank could not write its part of a checkpoint"):
        run.saver.finish()
    assert complete_iterations(root) == [1]
    dist.barrier()
    assert not list(root.glob(".iter_*")), "the room is free again"
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    assert run.saver.try_to_save(run.state), "with room, saving continues"
    run.saver.finish()
    assert complete_iterations(root) == [1, 3]


def test_a_full_disk_in_the_background_is_told_and_survived(tmp_path: Path) -> None:  # C44
    run_ranks(2, _fill_the_disk, tmp_path)
    run_ranks(2, _resume, tmp_path, 3)


@pytest.mark.parametrize(("steps", "interval", "kept"), [(4, 1, [1, 3, 4]), (3, 2, [3])])
def test_the_loop_tells_and_trains_on(
    steps: int,
    interval: int,
    kept: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The checkpoint of iteration 2 fails in the background; the run reports it, and saves later ones."""
    publish, failed = writer.Save.publish, []

    def full(save: writer.Save) -> None:
        if save.iteration == 2:
            failed.append(save.iteration)
            raise OSError(28, "No space left on device")
        publish(save)

    monkeypatch.setattr(writer.Save, "publish", full)
    job({"save": str(tmp_path), "async_save": True, "save_interval": interval, "train_iters": steps})
    assert failed == [2] and complete_iterations(tmp_path) == kept
    told = capsys.readouterr().out
    assert f"saving failed: a rank could not write its part of a checkpoint to {tmp_path}: " in told
    assert "No space left on device; free space there, or store fewer checkpoints with --keep-last" in told


def _fill_the_disk_of_rank_1(root: Path) -> str:
    """The output of rank 0 when another rank has no space."""
    run = start(TWO | {"save": str(root)})
    train(run, 1)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert not run.saver.try_to_save(run.state)
    return printed.getvalue()


def test_rank_0_says_why_another_rank_could_not_write(tmp_path: Path) -> None:
    first, second = run_ranks(2, _fill_the_disk_of_rank_1, tmp_path)
    assert "saving failed: a rank could not write its tensors" in first and "File too large" in first
    assert second == "" and not list(tmp_path.glob("*iter_*"))


def test_a_background_save_that_fails_last_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(save: writer.Save) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.Save, "publish", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        job({"save": str(tmp_path), "async_save": True, "train_iters": 2})
    assert find_checkpoint(str(tmp_path)) is None


# --- Retention.


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep_last": 2}, [6, 7]),
        ({"save_retain_interval": 3}, [3, 6, 7]),
        ({"keep_last": 2, "save_retain_interval": 4, "async_save": True}, [4, 6, 7]),
    ],
)
def test_old_checkpoints_go_by_policy(policy: dict, kept: list[int], tmp_path: Path) -> None:
    job({"save": str(tmp_path), "save_interval": 1, "train_iters": 7} | policy)
    assert complete_iterations(tmp_path) == kept
    assert (tmp_path / TRACKER).read_text() == "7"
    assert not list(tmp_path.glob(".iter_*"))


def test_nothing_goes_before_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with --keep-last 1, a failed save keeps the previous checkpoint."""
    job({"save": str(tmp_path), "keep_last": 1, "train_iters": 2})
    monkeypatch.setattr(writer, "track", lambda save, iteration: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(CheckpointError, match="no space"):
        job({"save": str(tmp_path), "load": str(tmp_path), "keep_last": 1, "train_iters": 3})
    assert 2 in complete_iterations(tmp_path)


# --- Checkpoints for fast restart.


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    """A folder with a permanent checkpoint of iteration 3 and a fast-restart one of iteration 5, as after a kill."""
    intervals = {"save_interval": 3, "non_persistent_save_interval": 1, "exit_interval": 5}
    job({"save": str(tmp_path), "train_iters": 7} | intervals)
    assert complete_iterations(tmp_path) == [3, 5], "the second is the one at the end"
    writer.remove(tmp_path / "iter_0000005")
    (tmp_path / TRACKER).write_text("3")
    assert complete_iterations(tmp_path / "non_persistent") == [5], "only the newest is kept"
    return tmp_path


def test_a_run_goes_on_from_the_newer_one(restarted: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"non_persistent_save_interval": 1, "train_iters": 7}
    assert start(JOB | settings | {"load": str(restarted), "save": str(restarted)}).state.iteration == 5
    straight = tmp_path_factory.mktemp("straight")
    job({"save": str(straight), "train_iters": 7})
    job(settings | {"save": str(restarted), "load": str(restarted)})
    first, second = stored(straight / "iter_0000007"), stored(restarted / "iter_0000007")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_damaged_one_is_told_and_passed_over(restarted: Path, capsys: pytest.CaptureFixture[str]) -> None:  # C58
    edit(restarted / "non_persistent" / "iter_0000005", lambda content: content.update(save_id="0" * 32))
    with (restarted / "non_persistent" / "iter_0000005" / "rank_00000.safetensors").open("ab") as file:
        file.write(b" ")
    run = start(JOB | {"load": str(restarted), "save": str(restarted), "non_persistent_save_interval": 1})
    assert run.state.iteration == 3
    told = capsys.readouterr().out
    assert "skipped a damaged checkpoint" in told and "loading iteration 3 from" in told


def test_a_folder_of_their_own(tmp_path: Path) -> None:
    """Such as a folder in memory."""
    own = {"non_persistent_global_ckpt_dir": str(tmp_path / "memory"), "non_persistent_save_interval": 2}
    job({"save": str(tmp_path / "disk"), "train_iters": 5} | own)
    assert complete_iterations(tmp_path / "memory") == [4]
    assert complete_iterations(tmp_path / "disk") == [5] and not (tmp_path / "disk" / "non_persistent").exists()


def test_those_of_a_run_that_was_taken_over_go_too(restarted: Path) -> None:
    """Otherwise the new run would resume from them after a restart, because they are newer than its own."""
    new = {"seed": 7, "overwrite_checkpoints": True, "non_persistent_save_interval": 100}
    job({"save": str(restarted), "train_iters": 2} | new)
    assert complete_iterations(restarted) == [2] and complete_iterations(restarted / "non_persistent") == []


# --- Access to the folder.


def _refused(settings: dict, named: str) -> None:
    run = start(JOB | settings)
    with pytest.raises(CheckpointError, match=named + r": another run writes its .* \(process \d+ on .*\); end"):
        run.saver.open()


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    """On all of its ranks; once the first run has ended, it may."""
    run = start(JOB | {"save": str(tmp_path)})
    train(run, 1)
    folder = save_run(run)
    hidden = tmp_path / ".iter_0000007.incomplete"
    hidden.mkdir()
    run_ranks(2, _refused, {"save": str(tmp_path), "load": str(tmp_path)}, "save=.*")
    assert hidden.is_dir(), "it may be what the first one is writing"
    assert complete_iterations(tmp_path) == [1]
    compare(run, stored(folder))
    for lock in run.saver._locks:
        lock.release()
    job({"save": str(tmp_path), "load": str(tmp_path), "train_iters": 4})
    assert complete_iterations(tmp_path) == [1, 4] and not hidden.exists()


def test_two_runs_may_not_share_a_folder_for_fast_restarts(tmp_path: Path) -> None:
    shared = {"non_persistent_global_ckpt_dir": str(tmp_path / "memory"), "non_persistent_save_interval": 1}
    run = start(JOB | shared | {"save": str(tmp_path / "one")})
    run.saver.open()
    run_ranks(2, _refused, shared | {"save": str(tmp_path / "other")}, "non_persistent_global_ckpt_dir=.*memory'")


@pytest.mark.parametrize("name", [name for name, each in settings().items() if each.legal in (FILE, FOLDER)])
def test_a_folder_without_a_name_is_refused(name: str) -> None:
    kind = "file" if name.endswith("_file") else "folder"
    told = f"{name}='' names no {kind}; it must be a {kind}"
    assert any(each.startswith(told) for each in problems(RunConfig.from_flat(SMALL | {name: ""}), 1))


@pytest.mark.parametrize("flag", ["keep_last", "async_save", "non_persistent_save_interval", "save_retain_interval"])
def test_flags_of_saving_need_a_folder(flag: str) -> None:
    value = True if flag == "async_save" else 2
    assert any(
        problem.startswith(f"{flag}={value} has no effect without --save FOLDER")
        for problem in problems(RunConfig.from_flat(SMALL | {flag: value}), 1)
    )


def test_another_run_is_not_saved_over(tmp_path: Path) -> None:
    """Starting from scratch over checkpoints is an error; with --overwrite-checkpoints they are deleted after the first
    save."""
    job({"save": str(tmp_path), "train_iters": 3})
    before = stored(tmp_path / "iter_0000003")
    with pytest.raises(CheckpointError, match="--overwrite-checkpoints"):
        job({"save": str(tmp_path), "train_iters": 2, "seed": 7})
    assert complete_iterations(tmp_path) == [3]
    job({"save": str(tmp_path), "train_iters": 2, "seed": 7, "overwrite_checkpoints": True})
    assert complete_iterations(tmp_path) == [2]
    after = stored(tmp_path / "iter_0000002")
    assert any(not torch.equal(before[name], after[name]) for name in before)
