"""A save that is killed before any of its file operations loses no checkpoint and no file of the user."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_core.checkpoint import CheckpointReader, find_checkpoint, removal
from megatron_core.checkpoint.folder import complete_iterations
from megatron_core.checkpoint.removal import drop_old, remove_hidden
from megatron_core.hub.megatron_lm.writer import Format, write_checkpoint
from megatron_core.training.compatibility import stored_config
from tests.checkpoint.operations import killed_before
from tests.checkpoint.test_damage import read, write
from tests.checkpoint.test_foreign import job

NOTES = "the user's notes"


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """File systems that can exchange names, and others; returns whether this one can."""
    if not request.param:
        monkeypatch.setattr(removal, "_exchange", lambda first, second: False)
    return bool(request.param)


def kills(place: Path, prepare: Callable[[Path], object], save: Callable[[Path], object]) -> Iterator[Path]:
    """Folders that ``prepare`` filled, in each of which ``save`` was killed before a later file operation."""
    prepare(place / "prepared")
    for number in count():
        root = place / f"killed{number}"
        shutil.copytree(place / "prepared", root)
        if not killed_before(number, lambda root=root: save(root)):
            assert number > 10
            return
        yield root
        shutil.rmtree(root)


def notes_below(root: Path, name: str) -> list[Path]:
    """The copies of a note of the user; kept notes may have another folder until the next start."""
    return [path for path in root.rglob(name) if path.is_file() and path.read_text() == NOTES]


def with_notes(root: Path) -> None:
    for iteration in (1, 2):
        folder = write(root, iteration, float(iteration))
        (folder / "sub").mkdir()
        (folder / "sub" / f"notes{iteration}.txt").write_text(NOTES)


def test_an_iteration_that_is_saved_again(names: bool, tmp_path: Path) -> None:
    """The only checkpoint: at any time the old one or the new one is complete."""

    def prepare(root: Path) -> None:
        folder = write(root, 2, 2.0)
        (folder / "notes2.txt").write_text(NOTES)

    for root in kills(tmp_path, prepare, lambda root: write(root, 2, 3.0)):
        assert len(notes_below(root, "notes2.txt")) == 1
        assert (root / "iter_0000002" / "manifest.json").exists() or not names
        folder = find_checkpoint(str(root))
        assert folder == root / "iter_0000002"
        with CheckpointReader(folder) as reader:
            assert not reader.verify()
        assert read(folder)[0] in (2.0, 3.0)
        remove_hidden(root)
        assert (root / "iter_0000002" / "notes2.txt").read_text() == NOTES and not list(root.glob(".iter_*"))
        assert (read(write(root, 2, 4.0)) == 4.0).all() and (folder / "notes2.txt").read_text() == NOTES


def test_rotation(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of the deleted checkpoint the notes stay where they are."""
    for root in kills(tmp_path, with_notes, lambda root: write(root, 3, 3.0, keep_last=1)):
        for iteration in (1, 2):
            note = root / f"iter_000000{iteration}" / "sub" / f"notes{iteration}.txt"
            assert note.read_text() == NOTES
        newest = complete_iterations(root)[-1]
        assert newest in (2, 3) and (read(root / f"iter_000000{newest}") == newest).all()
        capfd.readouterr()
        remove_hidden(root)
        assert not list(root.glob(".iter_*"))
        write(root, 4, 4.0, keep_last=1)
        assert complete_iterations(root) == [4]
        left = sorted(str(path.relative_to(root)) for path in root.glob("iter_000000[123]/**/*") if path.is_file())
        assert [name for name in left if "notes" in name] == [
            "iter_0000001/sub/notes1.txt",
            "iter_0000002/sub/notes2.txt",
        ]
        assert {Path(name).name for name in left} == {"notes1.txt", "notes2.txt", ".checkpoint_was_deleted"}
        job_may_continue(root)


def job_may_continue(root: Path) -> None:
    """Folders with kept files do not count as checkpoints of another program."""
    write(root, 2, 5.0)
    assert (root / "iter_0000002" / "sub" / "notes2.txt").read_text() == NOTES
    assert not (root / "iter_0000002" / ".checkpoint_was_deleted").exists()


def test_files_of_others_are_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_notes(tmp_path)
    for iteration in (3, 4, 5):
        write(tmp_path, iteration, 1.0, keep_last=1)
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"note: {tmp_path}/iter_000000{n} keeps sub/notes{n}.txt: not of the deleted checkpoint" for n in (1, 2)
    ]
    drop_old(tmp_path, 5, keep_last=1, keep_every=None)
    remove_hidden(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    job(save=str(folder), train_iters=2)
    return folder / "iter_0000002"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", ["torch_dist", "torch_dcp"])
def test_an_iteration_in_the_format_of_megatron(names: bool, form: Format, native: Path, tmp_path: Path) -> None:
    def save(root: Path) -> Path:
        with CheckpointReader(native) as reader:
            return write_checkpoint(reader, stored_config(native).model, root, form)

    def prepare(root: Path) -> None:
        (save(root) / "notes.txt").write_text(NOTES)

    def weights(folder: Path) -> int:
        return len(FileSystemReader(folder).read_metadata().state_dict_metadata)

    for root in kills(tmp_path, prepare, save):
        assert len(notes_below(root, "notes.txt")) == 1
        assert (root / "iter_0000002" / ".metadata").exists() or not names
        expected = weights(tmp_path / "prepared" / "iter_0000002")
        remove_hidden(root)
        assert (root / "iter_0000002" / "notes.txt").read_text() == NOTES and not list(root.glob(".iter_*"))
        assert weights(root / "iter_0000002") == expected
        assert (root / "latest_checkpointed_iteration.txt").read_text() == "2"
