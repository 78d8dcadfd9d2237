"""Checkpoints in the memory of several hosts: two simulated hosts of two ranks, whose memories are folders."""

from __future__ import annotations

import io
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.checkpoint.folder import complete_iterations, rank_file
from megatron_core.checkpoint.removal import remove
from megatron_core.checkpoint.writer import Save
from megatron_core.config import CheckpointConfig, RunConfig
from megatron_core.config.validate import problems
from megatron_core.errors import CheckpointError
from megatron_core.features.local_copies import copies
from megatron_core.features.local_copies.hosts import Hosts
from megatron_core.parallel import World
from megatron_core.training import pretrain
from megatron_core.training.saving import CheckpointSaver
from megatron_core.training.setup import Run
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.checkpoint.runs import SMALL, compare, start, stored, train
from tests.checkpoint.test_integrity import flip
from tests.defects.plant import planted

LAYOUT = {"num_layers": 1, "use_distributed_optimizer": True, "micro_batch_size": 1}
LOCAL = {"non_persistent_save_interval": 1, "non_persistent_ckpt_type": "local"}
NEWEST = "iter_0000002"


@pytest.fixture(autouse=True)
def _no_layout_stays() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def begin(root: Path, **settings: Any) -> Run:
    """This rank's run; a host has as many ranks as the tensor-parallel size; its memory is ``root/host0`` ..."""
    host = dist.get_rank() // settings.get("tensor_model_parallel_size", 1)
    folders = {"save": str(root / "disk"), "load": str(root / "disk")}
    folders["non_persistent_local_ckpt_dir"] = str(root / f"host{host}")
    return start(LAYOUT | LOCAL | folders | settings)


def save_whole(run: Run, folder: Path) -> None:
    """A normal checkpoint for comparison."""
    config = replace(run.config, checkpoint=CheckpointConfig(save=str(folder)))
    CheckpointSaver(config, run.data_parallel, run.optimizer, vocab_size=run.vocab_size, tokenizer=None).save(run.state)


def _first_run(root: Path, settings: dict) -> None:
    """Iteration 1 is on disk, 2 in memory; ``root/whole`` has iterations 2 and 3 of an undisturbed run."""
    run = begin(root, **settings)
    train(run, 1)
    run.saver.save(run.state)
    run.saver.save(run.state, temporary=True)
    train(run, 1)
    run.saver.save(run.state, temporary=True)
    save_whole(run, root / "whole")
    train(run, 1)
    save_whole(run, root / "whole")


@pytest.fixture(scope="module")
def after_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copies")
    run_ranks(2, _first_run, root, {"replication": True})
    return root


@pytest.fixture
def saved(after_two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(after_two, tmp_path / "run"))


def _resume(root: Path, settings: dict, iteration: int, steps: int) -> str:
    """Load ``iteration``, continue training, and compare all state of this rank; returns the output."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        run = begin(root, **settings)
    assert run.state.iteration == iteration
    train(run, steps)
    if iteration + steps > 1:
        compare(run, stored(root / "whole" / f"iter_{iteration + steps:07d}"))
    dist.barrier()
    assert not list(root.glob("host*/.iter_*.loading")), "what was loaded from takes no memory any more"
    return printed.getvalue()


def resume(root: Path, iteration: int, *, ranks: int = 2, steps: int = 0, **settings: Any) -> str:
    return str(run_ranks(ranks, _resume, root, settings, iteration, steps)[0])


# --- Location of files and copies.


def test_each_host_keeps_its_own_and_the_copies_of_another(saved: Path) -> None:
    """Only the newest checkpoint is kept."""
    for host in (0, 1):
        assert complete_iterations(saved / f"host{host}") == [2]
        there = sorted(path.name for path in (saved / f"host{host}" / NEWEST).iterdir())
        assert there == ["manifest.json", rank_file(0), rank_file(1)]
        assert not list((saved / f"host{host}").glob(".iter_*"))


def copies_are_on_other_hosts(_: Path) -> None:
    """For any sizes of hosts and any jump: the requested number of copies, each on another host, up to the number of
    hosts."""
    draw = random.Random(1)
    for _ in range(200):
        of_rank, sizes = list[int](), [draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
        for size in sizes:
            of_rank += [len(of_rank)] * size
        hosts, factor = Hosts(tuple(of_rank), 0), draw.randint(2, 4)
        for rank, own in enumerate(of_rank):
            keepers = hosts.keepers(rank, draw.choice([None, 1, 2, 5]), factor)
            having = [own, *(of_rank[keeper] for keeper in keepers)]
            assert len(having) == len(set(having)) == min(factor, len(sizes))
    hosts = Hosts((0, 0, 2, 2, 4, 4, 6, 6), 0)
    assert hosts.keepers(1, 2, 2) == [3] and hosts.keepers(7, None, 3) == [1, 3] and hosts.keepers(0, 4, 2) == [4]


# --- Lost hosts and damaged files.


def after_the_loss_of_a_host_the_run_goes_on(root: Path) -> None:
    """Bitwise equal; the replacement host receives the data that its ranks need."""
    shutil.rmtree(root / "host1")
    told = resume(root, 2, steps=1)
    assert "loading iteration 2 from the memory of 1 of 2 hosts" in told and "were received from other" in told


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_run_goes_on_with_other_hosts(ranks: int, saved: Path) -> None:
    """With one host less, and with more hosts, which are empty."""
    shutil.rmtree(saved / "host0")
    (saved / "host1").rename(saved / "host0")
    assert "from the memory of" in resume(saved, 2, ranks=ranks, global_batch_size=12 if ranks == 3 else 4)


def test_hosts_of_several_ranks(tmp_path: Path) -> None:
    """The first ranks of hosts keep copies for the first rank of the other host, and create the folder for both of its
    ranks."""
    settings = {"tensor_model_parallel_size": 2, "replication": True, "replication_jump": 2}
    run_ranks(4, _first_run, tmp_path, settings)
    shutil.rmtree(tmp_path / "host0")
    assert "from the memory of" in resume(tmp_path, 2, ranks=4, steps=1, **settings)


def test_three_copies_survive_the_loss_of_two_hosts(tmp_path: Path) -> None:
    settings = {"global_batch_size": 12, "replication": True, "replication_factor": 3}
    run_ranks(3, _first_run, tmp_path, settings)
    for host in (0, 1):
        shutil.rmtree(tmp_path / f"host{host}")
    output = resume(tmp_path, 2, ranks=3, steps=1, **settings)
    assert "loading iteration 2 from the memory of 1 of 3 hosts" in output


def test_if_all_hosts_are_lost_the_disk_is_taken(saved: Path) -> None:
    for host in (0, 1):
        shutil.rmtree(saved / f"host{host}")
    assert "no newer checkpoint in memory: loading the newest in" in resume(saved, 1)


@pytest.mark.parametrize(("on_disk", "whole"), [((2,), 2), ((3,), 2), ((1, 3), 2)])
def test_what_is_damaged_on_disk_is_taken_from_memory(on_disk: tuple[int, ...], whole: int, saved: Path) -> None:
    """Load the same iteration, or the one before it, with or without an older intact checkpoint on disk."""
    if 1 not in on_disk:
        shutil.rmtree(saved / "disk" / "iter_0000001")
    for iteration in set(on_disk) - {1}:
        folder = saved / "disk" / f"iter_{iteration:07d}"
        shutil.copytree(saved / "whole" / folder.name, folder)
        flip(folder / rank_file(0), 20_000)
        (saved / "disk" / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    told = resume(saved, whole, steps=1)
    assert "skipped a damaged checkpoint" in told or 1 not in on_disk
    assert f"loading iteration {whole} from the memory" in told


def test_without_copies_a_lost_host_costs_what_was_in_memory(tmp_path: Path) -> None:
    run_ranks(2, _first_run, tmp_path, {})
    shutil.rmtree(tmp_path / "host1")
    told = resume(tmp_path, 1)
    assert f"iteration 2 in memory is incomplete: no host has an intact copy of {rank_file(1)}" in told


def of_a_damaged_file_the_other_copy_is_loaded(root: Path) -> None:
    path = root / "host1" / NEWEST / rank_file(1)
    flip(path, 8 * path.stat().st_size - 3)
    assert f"skipped a damaged copy: {path} is damaged" in resume(root, 2)


def test_if_both_copies_are_damaged_the_disk_is_taken(saved: Path) -> None:
    """Damage a file, or the manifest."""
    flip(saved / "host0" / NEWEST / rank_file(1), 8000)
    flip(saved / "host1" / NEWEST / "manifest.json", 4000)
    told = resume(saved, 1)
    assert "skipped copies in memory" in told and "manifest.json" in told
    assert f"iteration 2 in memory is incomplete: no host has an intact copy of {rank_file(1)}" in told


def test_copies_of_another_run_are_not_loaded(saved: Path) -> None:
    (saved / "disk" / ".run").write_text("another")
    assert f"skipped copies in memory: {saved / 'host0' / NEWEST} is of another run" in resume(saved, 1)


def test_a_run_that_starts_anew_leaves_the_copies_of_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole runs: one ends in memory at 3 and on disk at 4, one continues it, and one starts from scratch."""
    memory = {"non_persistent_local_ckpt_dir": str(tmp_path / "memory"), "eval_iters": 0}
    settings = SMALL | LOCAL | memory | {"num_layers": 1, "save": str(tmp_path / "disk")}

    def job(**more: Any) -> str:
        pretrain(RunConfig.from_flat(settings | more), World(0, 1, 0, torch.device("cpu")))
        parallel_state.destroy_model_parallel()
        return capsys.readouterr().out

    job(train_iters=3, save_interval=5)
    job(train_iters=4, save_interval=4, load=settings["save"])
    assert complete_iterations(tmp_path / "memory") == [3] and complete_iterations(tmp_path / "disk") == [3, 4]
    remove(tmp_path / "disk" / "iter_0000003")
    remove(tmp_path / "disk" / "iter_0000004")
    (tmp_path / "disk" / "latest_checkpointed_iteration.txt").unlink()
    assert "loading iteration 3 from the memory" in job(train_iters=3, load=settings["save"])
    job(train_iters=1, overwrite_checkpoints=True)
    assert complete_iterations(tmp_path / "memory") == [1]


# --- Interrupted saves.


def _die_between(root: Path) -> None:
    """The second host dies after the next checkpoint has its final name on the first host."""
    run = begin(root)
    train(run, 1)
    if dist.get_rank() == 1:
        copies._rename = lambda save: os.kill(os.getpid(), signal.SIGKILL)
    run.saver.save(run.state, temporary=True)


def killed_before_all_hosts_have_the_newest_the_one_before_is_whole(root: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(2, _die_between, root)
    assert 3 in complete_iterations(root / "host0") and complete_iterations(root / "host1") == [2]
    (root / "host1" / NEWEST / rank_file(0)).unlink()  # a copy of the first host's files, which it still has
    assert "iteration 3 in memory is incomplete" in resume(root, 2)


def _full(write_copy: Callable[..., None]) -> Callable[..., None]:
    """The second host has no space for the copies of the first, which sends them anyway."""

    def full(*arguments: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        write_copy(*arguments)

    return full


def _unreadable(write: Callable[..., str]) -> Callable[..., str]:
    """The files written by the second host cannot be read."""

    def unreadable(save: Save, *arguments: Any) -> str:
        write(save, *arguments)
        return save.folder.read_text()

    return unreadable


def _fail_on_one_host(root: Path, name: str, failing: Callable[..., Any]) -> str:
    run = begin(root, replication=True)
    train(run, 1)
    if dist.get_rank() == 1:
        setattr(copies, name, failing(getattr(copies, name)))
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert not run.saver.try_to_save(run.state, temporary=True)
    dist.barrier()
    assert not list(root.glob("host*/.iter_*")), "the room is free again"
    return printed.getvalue()


@pytest.mark.parametrize(
    ("name", "failing", "what"),
    [("_write_copy", _full, "send its copies"), ("_write", _unreadable, "write its tensors")],
)
def test_what_fails_on_another_host_is_told_and_survived(
    name: str, failing: Callable[..., Any], what: str, saved: Path
) -> None:
    told, other = run_ranks(2, _fail_on_one_host, saved, name, failing)
    assert f"saving failed: a rank could not {what}" in told
    assert ("File too large" if failing is _full else "Is a directory") in told + other
    assert [complete_iterations(saved / f"host{host}") for host in (0, 1)] == [[2], [2]]


# --- Planted defects.

CHECKS = (
    copies_are_on_other_hosts,
    after_the_loss_of_a_host_the_run_goes_on,
    of_a_damaged_file_the_other_copy_is_loaded,
    killed_before_all_hosts_have_the_newest_the_one_before_is_whole,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sound_code_passes(check: Callable[[Path], None], saved: Path) -> None:
    check(saved)


@pytest.mark.parametrize(
    ("target", "old", "new", "check"),
    [
        (
            "features.local_copies.hosts:Hosts.keepers",
            "not in having), None)",
            "is not None), None)",
            copies_are_on_other_hosts,
        ),
        (
            "features.local_copies.restore:CopiesReader._transfers",
            "starts[key], dtype",
            "starts[min(keys)], dtype",
            after_the_loss_of_a_host_the_run_goes_on,
        ),
        (
            "features.local_copies.restore:_held",
            "files_by_host[host] - damaged[host]",
            "files_by_host[host]",
            of_a_damaged_file_the_other_copy_is_loaded,
        ),
        (
            "features.local_copies.copies:save_copies",
            'run_on_all_ranks(agree, "rename the folder of a checkpoint", (lambda: _rename(save)) if first else None)',
            "remove(save.folder / 'iter_0000002')\n        _rename(save)",  # the host may be ended after it
            killed_before_all_hosts_have_the_newest_the_one_before_is_whole,
        ),
    ],
    ids=[
        "a copy on the same host",
        "other boxes are sent",
        "damage is reported but ignored",
        "the one before goes at once",
    ],
)
def test_planted_defect_is_found(target: str, old: str, new: str, check: Callable[[Path], None], saved: Path) -> None:
    with planted(target, old, new), pytest.raises((AssertionError, RankFailure)):
        check(saved)


# --- Settings.


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"non_persistent_local_ckpt_dir": None},
            "non_persistent_ckpt_type=local needs a folder in the memory",
        ),
        (
            {"non_persistent_global_ckpt_dir": "a"},
            "non_persistent_global_ckpt_dir=a has no effect without --non-persistent-ckpt-type global",
        ),
        ({"non_persistent_ckpt_type": "global"}, "non_persistent_local_ckpt_dir=m has no effect without"),
        (
            {"non_persistent_ckpt_type": "global", "non_persistent_local_ckpt_dir": None, "replication": True},
            "replication=True has no effect without --non-persistent-ckpt-type local",
        ),
        ({"replication_jump": 2}, "replication_jump=2 has no effect without --replication"),
        (
            {"replication": True, "replication_factor": 1},
            "replication_factor=1 is out of range; it must be an integer >= 2",
        ),
        ({"replication": True, "replication_jump": 0}, "replication_jump=0 is out of range"),
        ({"non_persistent_save_interval": None}, "non_persistent_ckpt_type=local has no effect without"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, told: str) -> None:
    whole = SMALL | LOCAL | {"save": "a", "non_persistent_local_ckpt_dir": "m"}
    assert list(problems(RunConfig.from_flat(whole), 1)) == []
    (problem,) = problems(RunConfig.from_flat(whole | settings), 1)
    assert problem.startswith(told)


def _without_a_folder(root: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        begin(root)
    return str(error.value)


def test_a_folder_that_one_host_cannot_make_is_told_by_all(tmp_path: Path) -> None:
    (tmp_path / "host1").write_text("a file")
    told, other = run_ranks(2, _without_a_folder, tmp_path)
    assert told == other and told.startswith(f"non_persistent_local_ckpt_dir='{tmp_path / 'host1'}' cannot be written")
