"""Saving never deletes or overwrites files of others or follows planted links, and survives a deleted folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from safetensors.torch import load_file

from megatron_core import parallel_state
from megatron_core.checkpoint import Save, find_checkpoint, save_checkpoint
from megatron_core.checkpoint.folder import (
    LOCK,
    RUN,
    TRACKER,
    complete_iterations,
    is_own,
    refuse_other_checkpoints,
    run_id,
)
from megatron_core.checkpoint.removal import drop_old
from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.errors import CheckpointError, ConfigError, MegatronError
from megatron_core.output_file import make_folder
from megatron_core.parallel import World
from megatron_core.reports.metrics import read_metrics
from megatron_core.training import Callback, pretrain
from megatron_core.training.built_in_callbacks import Reports
from megatron_core.training.step import StepResult
from tests.checkpoint.runs import SMALL
from tests.checkpoint.test_damage import piece, write

JOB = SMALL | {"num_layers": 1, "eval_iters": 0, "train_iters": 3, "peak_tflops": 1.0}
FAST = {"non_persistent_save_interval": 1}
KINDS = {
    "local": FAST | {"non_persistent_ckpt_type": "local"},
    "global": FAST | {"non_persistent_ckpt_type": "global"},
}
Files = dict[str, bytes | str]


@pytest.fixture(autouse=True)
def _no_layout_stays() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def job(*callbacks: Callback, **settings: object) -> None:
    try:
        pretrain(RunConfig.from_flat(JOB | settings), World(0, 1, 0, torch.device("cpu")), callbacks=callbacks)
    finally:
        parallel_state.destroy_model_parallel()


def contents(root: Path) -> Files:
    """Every file and link below ``root``."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"data of another program")


def fast_folder(kind: str, folder: Path) -> dict[str, object]:
    return KINDS[kind] | {f"non_persistent_{kind}_ckpt_dir": str(folder)}


# --- Folders for fast restart.


@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_restart_in_the_folder_of_save_is_refused(kind: str, tmp_path: Path) -> None:
    save, link = tmp_path / "save", tmp_path / "link"
    job(save=str(save))
    before = contents(save)
    config = RunConfig.from_flat(JOB | {"save": str(save)} | fast_folder(kind, save / "x" / ".."))
    assert any(f"non_persistent_{kind}_ckpt_dir=" in each and "save" in each for each in problems(config, 1))
    link.symlink_to(save)
    with pytest.raises(CheckpointError, match=rf"non_persistent_{kind}_ckpt_dir=.*is the folder of --save"):
        job(save=str(save), load=str(save), **fast_folder(kind, link) | {"train_iters": 5})
    assert contents(save) == before


def test_checkpoints_of_earlier_releases_in_the_default_folder_are_replaced(tmp_path: Path) -> None:
    """Their manifests have no run id; elsewhere such a checkpoint counts as permanent."""
    job(save=str(tmp_path), **FAST | {"train_iters": 2})
    manifest = tmp_path / "non_persistent" / "iter_0000002" / "manifest.json"
    text = manifest.read_text()
    assert '"run": "' in text
    manifest.write_text(text.replace('"run": "', '"walk": "'))
    refuse_other_checkpoints("save", manifest.parents[1], tmp_path, [])
    with pytest.raises(CheckpointError, match="holds iter_0000002, a permanent checkpoint"):
        refuse_other_checkpoints("save", manifest.parents[1], tmp_path / "other", [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_restart_in_the_folder_of_other_permanent_checkpoints_is_refused(kind: str, tmp_path: Path) -> None:
    job(save=str(tmp_path / "other"), save_interval=1)
    before = contents(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"is the --save folder of another run \(it contains config\.yaml\)"):
        job(save=str(tmp_path / "own"), **fast_folder(kind, tmp_path / "other"))
    assert contents(tmp_path / "other") == before
    (tmp_path / "other" / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"holds iter_0000001, a permanent checkpoint; .* choose another folder"):
        job(save=str(tmp_path / "own"), **fast_folder(kind, tmp_path / "other"))
    del before["config.yaml"]
    assert contents(tmp_path / "other") == before
    with pytest.raises(CheckpointError, match="is itself a checkpoint"):
        job(save=str(tmp_path / "own"), **fast_folder(kind, tmp_path / "other" / "iter_0000002"))
    assert contents(tmp_path / "other") == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_restart_in_the_folder_of_another_run_is_refused(kind: str, tmp_path: Path) -> None:
    memory = fast_folder(kind, tmp_path / "memory")
    job(save=str(tmp_path / "one"), **memory)
    before = contents(tmp_path / "memory")
    with pytest.raises(CheckpointError, match=r"ckpt_dir=.*holds iter_0000003, a checkpoint of another run"):
        job(save=str(tmp_path / "two"), **memory)
    assert contents(tmp_path / "memory") == before
    # The same run may resume there, and so may a run from scratch in the same --save, even if others were killed before
    # they saved there.
    run_id(tmp_path / "one", restart=True)
    run_id(tmp_path / "one", restart=True)
    job(save=str(tmp_path / "one"), load=str(tmp_path / "one"), **memory | {"train_iters": 5})
    job(save=str(tmp_path / "one"), overwrite_checkpoints=True, **memory)
    assert complete_iterations(tmp_path / "memory") == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_of_the_run_itself_is_replaced(kind: str, tmp_path: Path) -> None:
    settings = {"save": str(tmp_path / "disk"), **fast_folder(kind, tmp_path / "memory")}
    job(**settings)
    manifest = tmp_path / "memory" / "iter_0000003" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-30])
    job(**settings, load=settings["save"], **{"train_iters": 5})
    assert complete_iterations(tmp_path / "memory") == [5]


# --- Checkpoints and files of other programs.

MEGATRON = ("iter_0000002/mp_rank_00/model_optim_rng.pt",)
FOREIGN = {
    "Megatron-LM": (*MEGATRON, TRACKER),
    "torch_dist": ("iter_0000002/.metadata", "iter_0000002/common.pt", "iter_0000002/__0_0.distcp"),
    "release": ("release/mp_rank_00/model_optim_rng.pt", TRACKER),
    "a later iteration": ("iter_0000900/mp_rank_00/model_optim_rng.pt",),
    "another manifest": ("iter_0000002/manifest.json", "iter_0000002/weights.bin"),
    "a file": ("iter_0000002",),
    "further files next to ours": ("iter_0000002/rank_00000.safetensors", "iter_0000002/optimizer.pt"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_foreign_checkpoints_is_refused(name: str, tmp_path: Path) -> None:
    put(tmp_path / "save", *FOREIGN[name])
    if name == "Megatron-LM":
        (tmp_path / "save" / TRACKER).write_text("2")
    before = contents(tmp_path / "save")
    with pytest.raises(CheckpointError, match=r"save='.*(not a checkpoint of this|of another) program"):
        job(save=str(tmp_path / "save"), keep_last=1, overwrite_checkpoints=True)
    with pytest.raises(CheckpointError, match=r"this program|another program"):
        save_checkpoint(Save(tmp_path / "save", 900 if "later" in name else 2, {}), [piece(1.0)], lambda ok: ok)
    assert contents(tmp_path / "save") == before


def test_foreign_folders_that_appear_later_stay(tmp_path: Path) -> None:
    write(tmp_path, 1, 1.0)
    put(tmp_path, "iter_0000002/manifest.json", "iter_0000002/model.pt", ".iter_notes/text")
    drop_old(tmp_path, 3, keep_last=1, keep_every=None)
    assert complete_iterations(tmp_path) == [2] and (tmp_path / "iter_0000002" / "model.pt").is_file()
    with pytest.raises(CheckpointError, match="iter_0000002"):
        write(tmp_path, 2, 2.0)
    assert (tmp_path / "iter_0000002" / "model.pt").is_file() and not list(tmp_path.glob(".iter_0*"))
    write(tmp_path, 3, 3.0, keep_last=1)
    assert (tmp_path / "iter_0000002" / "model.pt").is_file() and (tmp_path / ".iter_notes" / "text").is_file()


def test_damaged_checkpoints_are_still_ours(tmp_path: Path) -> None:
    for damage in ("none", "no manifest", "a damaged manifest", "no files", "nothing"):
        folder = write(tmp_path, 1, 1.0)
        if damage in ("no manifest", "nothing"):
            (folder / "manifest.json").unlink()
        if damage == "a damaged manifest":
            (folder / "manifest.json").write_text("{")
        if damage in ("no files", "nothing"):
            (folder / "rank_00000.safetensors").unlink()
        assert is_own(folder), damage
    assert not is_own(tmp_path / "absent")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "failures.jsonl", LOCK, RUN])
def test_files_of_others_are_not_overwritten(name: str, tmp_path: Path) -> None:
    put(tmp_path, name)
    with pytest.raises(MegatronError, match=name.replace(".", r"\.")):
        job(save=str(tmp_path), **FAST)
    assert (tmp_path / name).read_bytes() == b"data of another program" and find_checkpoint(str(tmp_path)) is None


# --- Links.


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    job(save=str(folder), **FAST)
    return folder


@pytest.mark.parametrize("target", ["a file", "absent"])
@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "failures.jsonl", LOCK, RUN, TRACKER, "metrics.ranks/rank00000.jsonl"]
)
def test_planted_links_are_not_followed(name: str, target: str, tmp_path: Path, finished: Path) -> None:
    """Neither to a file that looks like our own, nor to a place where a file could be created."""
    save, other = tmp_path / "save", tmp_path / "other"
    shutil.copytree(finished, other)
    victim = other / name if target == "a file" and name != "failures.jsonl" else tmp_path / "absent"
    (save / name).parent.mkdir(parents=True)
    (save / name).symlink_to(victim)
    before = contents(tmp_path)
    with pytest.raises(MegatronError, match=r"link"):
        job(save=str(save), **FAST)
    after = contents(tmp_path)
    assert {path: after.get(path) for path in before} == before and not (tmp_path / "absent").exists()


def test_a_planted_temporary_name_is_replaced(tmp_path: Path) -> None:
    put(tmp_path, "victim", "folder/file")
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / f".{TRACKER}").symlink_to(tmp_path / "victim")
    for name in (".iter_0000001.incomplete", ".iter_0000001.replaced"):
        (tmp_path / "save" / name).symlink_to(tmp_path / "folder")
    write(tmp_path / "save", 1, 1.0)
    assert find_checkpoint(str(tmp_path / "save")) is not None
    assert {(tmp_path / name).read_bytes() for name in ("victim", "folder/file")} == {b"data of another program"}
    assert not list((tmp_path / "save").glob(".*"))


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "save").symlink_to(tmp_path / "disk")
    job(save=str(tmp_path / "save"))
    job(save=str(tmp_path / "save"), load=str(tmp_path / "save"), train_iters=5)
    assert complete_iterations(tmp_path / "disk") == [3, 5]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all users may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_new_folders_in_shared_places_are_private(shared: Path) -> None:
    make_folder(shared / "gpt" / "more")
    assert (shared / "gpt").stat().st_mode & 0o777 == 0o700
    make_folder(shared / "gpt")


@pytest.mark.parametrize("is_link", [False, True])
def test_folders_of_others_in_shared_places_are_refused(
    is_link: bool, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_link:
        (tmp_path / "own").mkdir()
        (shared / "gpt").symlink_to(tmp_path / "own")
    else:
        (shared / "gpt").mkdir(mode=0o777)
    if os.geteuid() == 0:
        os.chown(shared / "gpt", 4321, -1, follow_symlinks=False)
    else:  # only root can change the owner of folders
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    for kind in KINDS:
        with pytest.raises(CheckpointError, match=r"it belongs to user \d+, in a folder that all users may write"):
            job(save=str(tmp_path / kind), **fast_folder(kind, shared / "gpt" / "a"))
    assert not (shared / "gpt" / "a").exists()


# --- A folder that is deleted during training.


class DeleteAfter(Callback):
    """Deletes files directly after the reports of a step."""

    priority = Reports.priority - 1

    def __init__(self, step: int, delete: Callable[[], None]) -> None:
        self.step, self.delete = step, delete

    def after_step(self, result: StepResult) -> None:
        if self.run.state.iteration == self.step:
            self.delete()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_deleted_folder_is_made_again(
    in_background: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    # A folder with another name, because a save in the background writes while files are deleted one by one.
    deleting = DeleteAfter(3, lambda: save.rename(tmp_path / "deleted"))
    job(deleting, save=str(save), save_interval=2, train_iters=6, async_save=in_background, **FAST)
    said = [line for line in capsys.readouterr().out.splitlines() if "was deleted" in line]
    assert said == [f"note: {save} was deleted or renamed during training; it was created again"]
    assert complete_iterations(save) == [4, 6] and (save / TRACKER).read_text() == "6"
    assert [record["iteration"] for record in read_metrics(save / "metrics.jsonl")] == [4, 5, 6]
    assert load_file(save / "iter_0000006" / "rank_00000.safetensors")
    for name in (LOCK, RUN, "config.yaml", "metrics.ranks/rank00000.jsonl", "non_persistent/.lock"):
        assert (save / name).stat().st_size, name
    job(load=str(save), save=str(save), train_iters=7)


def test_a_deleted_file_is_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("config.yaml", "metrics.jsonl", LOCK)
    job(DeleteAfter(1, lambda: [(tmp_path / name).unlink() for name in names]), save=str(tmp_path))
    assert all((tmp_path / name).stat().st_size for name in names)
    assert [record["iteration"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [2, 3]
    assert f"note: {tmp_path / LOCK} was deleted" in capsys.readouterr().out


def test_a_folder_that_another_run_has_taken_since_is_left_to_it(tmp_path: Path) -> None:
    """Training fails at its last save."""
    save, others = tmp_path / "save", list[subprocess.Popen[bytes]]()
    lock = "import fcntl; f = open('.lock', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"

    def replace() -> None:
        shutil.rmtree(save)
        save.mkdir()
        others.append(subprocess.Popen([sys.executable, "-c", lock], cwd=save, stdin=PIPE, stdout=PIPE))
        assert others[0].stdout.readline()

    try:
        with pytest.raises(CheckpointError, match="another run writes its checkpoints there"):
            job(DeleteAfter(1, replace), save=str(save))
    finally:
        others[0].communicate(b"\n")
    assert complete_iterations(save) == []


def test_write_config_keeps_other_files(tmp_path: Path) -> None:
    from megatron_core.config.cli import write_config

    path = tmp_path / "own.yaml"
    path.write_text("num_layers: 2 # by hand\n")
    with pytest.raises(ConfigError, match=r"own\.yaml exists and is not a configuration that a run wrote"):
        write_config(RunConfig(), path)
    assert path.read_text() == "num_layers: 2 # by hand\n"
