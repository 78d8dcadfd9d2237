"""Planted defects of saving and loading: each is silent, and each is found by a check that the correct code passes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_core.checkpoint import Save, find_checkpoint, open_newest, save_checkpoint
from megatron_core.checkpoint.folder import TRACKER, complete_iterations
from megatron_core.checkpoint.hashes import StoredFile, damage
from megatron_core.errors import CheckpointError
from megatron_core.features.background_saves.snapshot import Snapshot
from tests.checkpoint.operations import file_operations
from tests.checkpoint.test_damage import piece, read, write
from tests.checkpoint.test_integrity import CPU, TENSORS, flip
from tests.defects.plant import planted

Check = Callable[[Path], None]
"""Fails if the code is wrong."""


def files_of_another_save(root: Path) -> None:
    """With the same iteration and the same sizes, and if hashes are not compared."""
    ours, theirs = write(root / "ours", 3, 1.0), write(root / "theirs", 3, 2.0)
    shutil.copyfile(theirs / TENSORS, ours / TENSORS)
    with pytest.raises(CheckpointError, match="another save"):
        read(ours)


def every_file_is_hashed_once(root: Path) -> None:
    """For any number of ranks that share the work: all of these files are missing, and each is reported once."""
    files = {f"{n}.bin": StoredFile(n % 3, "") for n in range(7)}
    for shares in range(1, 9):
        faults = [damage(root, files, share=share, shares=shares) for share in range(shares)]
        missed = [fault for by_name in faults for fault in by_name.values()]
        assert sorted(fault.split()[0] for fault in missed) == [str(root / name) for name in sorted(files)]


def a_flipped_bit_is_refused(root: Path) -> None:
    folder = write(root, 1, 1.0)
    flip(folder / TENSORS, 8 * (folder / TENSORS).stat().st_size - 3)
    with pytest.raises(CheckpointError, match="its hash differs"):
        open_newest(str(root), None, device=CPU)


def events_of_a_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Files flushed to disk and renamed, in order, as (kind, path) inside ``root``."""
    events: list[tuple[str, str]] = []
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def note(what: str, path: object) -> None:
        events.append((what, os.path.relpath(str(path), root)))

    monkeypatch.setattr(os, "fsync", lambda fd: (note("sync", os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda old, new: (note("rename", new), replace(old, new))[1])
    monkeypatch.setattr(Path, "rename", lambda old, new: (note("rename", new), rename(old, new))[1])
    save_checkpoint(Save(root, 2, {}, keep_last=1), [piece(2.0)], lambda ok: ok)
    monkeypatch.undo()
    return events


def what_is_published_is_on_disk(root: Path) -> None:
    """After a power cut at any time, everything with a final name is intact: content first, then names, then
    deletions."""
    write(root, 1, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        events = events_of_a_save(root, patch)
    partial = ".iter_0000002.incomplete"
    published = events.index(("rename", "iter_0000002"))
    for name in (f"{partial}/{TENSORS}", f"{partial}/manifest.json", partial):
        assert ("sync", name) in events[:published], name
    tracked = events.index(("rename", TRACKER))
    assert published < events.index(("sync", f".{TRACKER}")) < tracked < events.index(("sync", "."), tracked)
    gone = events.index(("rename", ".iter_0000001.removed"))
    assert events.index(("sync", "."), tracked) < gone, "the old one goes when the new one is safe"


def the_newest_stay(root: Path) -> None:
    for keep in ({"keep_last": 2}, {"keep_every": 2}, {"keep_last": 1, "keep_every": 3}):
        folder = root / "_".join(keep)
        for iteration in range(1, 6):
            write(folder, iteration, float(iteration), **keep)
            assert find_checkpoint(str(folder)).name == f"iter_{iteration:07d}"
    assert [complete_iterations(root / name) for name in ("keep_last", "keep_every", "keep_last_keep_every")] == [
        [4, 5],
        [2, 4, 5],
        [3, 5],
    ]


def a_snapshot_stays_as_it_was(root: Path) -> None:
    live, snapshot = [piece(1.0), piece(2.0, 7)], Snapshot()
    for value in (3.0, 5.0):  # the second one in the same memory
        copies, complete = snapshot.take(live[:1], live[1:])
        live[1].memory.fill_(value)
        complete()
        assert (copies[1].memory != value).all(), "copied at once"
        kept = [copy.memory.clone() for copy in copies]
        for each in live:
            each.memory.fill_(value)
        assert all((copy.memory == before).all() for copy, before in zip(copies, kept, strict=True))


def a_save_that_fails_leaves_the_one_before(root: Path) -> None:
    write(root, 1, 1.0)
    absent = {"tokenizer/x": root / "absent"}
    with pytest.raises(CheckpointError):
        write(root, 1, 2.0, extra_files=absent)
    assert (read(root / "iter_0000001") == 1.0).all() and not list(root.glob(".iter_*"))


def an_iteration_saved_anew_stays_there(root: Path) -> None:
    """Before every operation on a file, one of both checkpoints has the final name."""
    write(root, 2, 1.0)
    manifest = root / "iter_0000002" / "manifest.json"

    def check(event: str, path: str) -> None:
        assert manifest.exists(), (event, path)

    with file_operations(check):
        write(root, 2, 2.0)
    assert (read(root / "iter_0000002") == 2.0).all() and not list(root.glob(".iter_*"))


def files_of_the_user_stay(root: Path) -> None:
    """In a checkpoint that is replaced, and in one that is rotated out."""
    for iteration in (1, 2):
        (write(root, iteration, 1.0) / f"notes{iteration}.txt").write_text("notes")
    write(root, 2, 2.0)
    write(root, 3, 3.0, keep_last=1)
    assert [path.read_text() for path in sorted(root.glob("iter_*/notes*"))] == ["notes", "notes"]
    assert complete_iterations(root) == [3] and not list(root.glob("iter_000000[12]/rank*"))


def a_replacement_that_was_interrupted_is_undone(root: Path) -> None:
    """On file systems that cannot exchange names, after a kill between the two renames."""
    write(root, 2, 2.0)
    (root / "iter_0000002").rename(root / ".iter_0000002.replaced")
    assert find_checkpoint(str(root)) == root / "iter_0000002" and (read(root / "iter_0000002") == 2.0).all()


@dataclass(frozen=True)
class Defect:
    """A fragment of a function, its replacement, and the check that detects it."""

    name: str
    target: str
    old: str
    new: str
    check: Check


DEFECTS = (
    Defect(
        "a replaced checkpoint takes the user's files along",
        "checkpoint.removal:delete_hidden",
        "_move(hidden / name, final / name)",
        "(hidden / name).unlink()",
        files_of_the_user_stay,
    ),
    Defect(
        "a checkpoint that was about to be replaced stays hidden",
        "checkpoint.folder:find_candidates",
        "restore_replaced(root)",
        "pass",
        a_replacement_that_was_interrupted_is_undone,
    ),
    Defect(
        "a file's save id is not compared",
        "checkpoint.reader:CheckpointReader._file",
        'if (metadata.get("save_id"), metadata.get("iteration")) != expected:',
        'if metadata.get("iteration") != expected[1]:',
        files_of_another_save,
    ),
    Defect(
        "every save has the same id",
        "checkpoint.writer:Save.prepare",
        "uuid.uuid4().hex",
        '"0"',
        files_of_another_save,
    ),
    Defect(
        "each rank hashes the files of the others",
        "checkpoint.hashes:_share",
        "if least == share:",
        "if least != share:",
        every_file_is_hashed_once,
    ),
    Defect(
        "the files of the last share are not hashed",
        "checkpoint.hashes:_share",
        "loads = [0] * shares",
        "loads = [0] * (shares + 1)",
        every_file_is_hashed_once,
    ),
    Defect(
        "sizes are compared, hashes are not",
        "checkpoint.hashes:_fault",
        "content_hash(path) == expected.hash",
        "content_hash(path)",
        a_flipped_bit_is_refused,
    ),
    Defect(
        "tensors are renamed before they are on disk",
        "checkpoint.hashes:_DiskFile.close",
        "os.fsync(self._file.fileno())",
        "pass",
        what_is_published_is_on_disk,
    ),
    Defect(
        "the folder is renamed before its names are on disk",
        "checkpoint.writer:Save.complete",
        "sync_folder(self.contents)",
        "pass",
        what_is_published_is_on_disk,
    ),
    Defect(
        "the tracker names a checkpoint that has not its name yet",
        "checkpoint.writer:Save.publish",
        "before = self._give_name()\n    track(self.folder, self.iteration)",
        "track(self.folder, self.iteration)\n    before = self._give_name()",
        what_is_published_is_on_disk,
    ),
    Defect(
        "old checkpoints go before the new one is tracked",
        "checkpoint.writer:Save.publish",
        "before = self._give_name()",
        "before = self._give_name()\n    drop_old(self.folder, self.iteration, keep_last=1, keep_every=None)\n"
        "    remove(self.folder / 'iter_0000001')",
        what_is_published_is_on_disk,
    ),
    Defect(
        "an iteration's checkpoint is deleted before the new one has its name",
        "checkpoint.writer:Save._give_name",
        "return give_name(self.partial, self.final)",
        "remove(self.final)\n    return give_name(self.partial, self.final)",
        an_iteration_saved_anew_stays_there,
    ),
    Defect(
        "the oldest checkpoints are kept",
        "checkpoint.removal:drop_old",
        "upto[-(keep_last or 1) :]",
        "upto[: keep_last or 1]",
        the_newest_stay,
    ),
    Defect(
        "without --keep-last the newest goes",
        "checkpoint.removal:drop_old",
        "upto[-(keep_last or 1) :]",
        "upto[len(upto) - (keep_last or 0) :]",
        the_newest_stay,
    ),
    Defect(
        "a snapshot is the weights themselves",
        "features.background_saves.snapshot:Snapshot.take",
        "memory=room.view(piece.memory.dtype).view(piece.memory.shape)",
        "memory=piece.memory",
        a_snapshot_stays_as_it_was,
    ),
    Defect(
        "the old checkpoint of an iteration goes before the new one is complete",
        "checkpoint.writer:Save.prepare",
        "self.partial.mkdir(parents=True)",
        "remove(self.final)\n        self.partial.mkdir(parents=True)",
        a_save_that_fails_leaves_the_one_before,
    ),
)


@pytest.mark.parametrize("check", dict.fromkeys(defect.check for defect in DEFECTS), ids=lambda check: check.__name__)
def test_sound_code_passes(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_planted_defect_is_found(defect: Defect, tmp_path: Path) -> None:
    found = (AssertionError, pytest.fail.Exception, ValueError, CheckpointError)
    with planted(defect.target, defect.old, defect.new), pytest.raises(found):
        defect.check(tmp_path)
