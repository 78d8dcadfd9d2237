"""A folder of checkpoints: finding, naming and locking.

docs/checkpoints.md, "The format", lists the files of such a folder.
"""

import errno
import fcntl
import os
import re
import socket
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_core.checkpoint.formats import formats_in
from megatron_core.checkpoint.hashes import sync_folder, write_file, wrong_sizes
from megatron_core.checkpoint.manifest import FORMAT, MANIFEST, Manifest
from megatron_core.config.checkpoint import TEMPORARY_FOLDER
from megatron_core.errors import CheckpointError
from megatron_core.locations import in_storage, location, read_part, real
from megatron_core.output_file import is_still_at, no_follow

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "config.yaml"
LOCK = ".lock"
REMAINS = ".checkpoint_was_deleted"
"""File in the folder of a deleted checkpoint that contains files of others: the manifest until all files are deleted,
then empty."""
DISTRIBUTED_STATE = "__state.distcp"
"""File that only this program writes into a checkpoint of torch.distributed.checkpoint."""
RUN = ".run"
"""File with the id of the run that saves here; the run's fast-restart checkpoints have the same id."""
_MOST_IDS = 33 * 1000
"""Maximum number of characters read from that file."""
_ITERATION = re.compile(r"iter_\d{7,}")
_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(?:incomplete|replaced|removed|loading)")
_RANK_FILE = re.compile(r"rank_\d{5,}\.safetensors")


def iteration_folder(save: Path, iteration: int) -> Path:
    """The folder of one iteration's checkpoint."""
    return save / f"iter_{iteration:07d}"


def iteration_of(folder: Path) -> int:
    """The iteration in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("iter_"))


def rank_file(rank: int) -> str:
    """The name of the file with the boxes of ``rank``."""
    return f"rank_{rank:05d}.safetensors"


def runs_of(save: Path) -> list[str]:
    """The ids of the runs that have saved into ``save`` with fast restart, oldest first.

    A run that starts from scratch gets a new id.
    """
    try:
        return (save / RUN).read_text()[-_MOST_IDS:].split()
    except (OSError, ValueError):
        return []


def run_of(save: Path) -> str:
    """The id of the latest run that saved into ``save``; empty if there is none."""
    return (runs_of(save) or [""])[-1]


def run_id(save: Path, *, restart: bool) -> str:
    """Like ``run_of``, but a new id if there is none or if the run starts with ``restart``."""
    if restart or not run_of(save):
        write_runs(save, [*runs_of(save), uuid.uuid4().hex])
    return run_of(save)


def write_runs(save: Path, runs: Sequence[str]) -> None:
    """Write the ids that ``runs_of`` reads. Errors: ``CheckpointError`` if the file belongs to another program."""
    path = save / RUN
    hidden = save / f"{RUN}.new"
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link, which is not allowed here; remove it")
    if not all(re.fullmatch("[0-9a-f]{32}", run) for run in runs_of(save)):
        raise CheckpointError(f"{path} exists, but does not contain run ids; remove it, or choose another folder")
    replace_file(path, hidden, "".join(f"{run}\n" for run in runs).encode())


def replace_file(path: Path, hidden: Path, data: bytes) -> None:
    """Write a file of the folder, or replace it by one rename from ``hidden``; an object is replaced at once."""
    if in_storage(path) is not None:
        path.write_bytes(data)
        return
    hidden.unlink(missing_ok=True)
    write_file(hidden, data)
    os.replace(hidden, path)
    sync_folder(path.parent)


def is_own(folder: Path) -> bool:
    """Whether ``folder`` is empty or a checkpoint of this program, even a damaged one."""
    with suppress(OSError):
        # The first bytes suffice: a manifest of a large model has many megabytes, and a damaged one still says whose it
        # is.
        if f'"format": "{FORMAT}"'.encode() in read_part(folder / MANIFEST, 0, 100):
            return True
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()} - {MANIFEST, "tokenizer"}
    return all(map(_RANK_FILE.fullmatch, names)) and (bool(names) or not any(folder.iterdir()))


def is_own_distributed(folder: Path) -> bool:
    """Whether ``folder`` is a checkpoint of torch.distributed.checkpoint that this program wrote."""
    return (folder / ".metadata").is_file() and (folder / DISTRIBUTED_STATE).is_file()


def refuse_foreign(
    named: str, save: Path, only: int | None = None, *, is_ours: Callable[[Path], bool] = is_own
) -> None:
    """``CheckpointError`` if saving into ``save`` could replace or delete files of another program.

    These are folders such as ``iter_0000002`` (with ``only``: the folder of that iteration) and the tracker file.
    ``named`` is the setting with its value, for the message. ``is_ours`` recognizes checkpoints of the format.
    """
    what = ""
    if (save / MANIFEST).is_file() and is_own(save):
        what = f"is itself a checkpoint ({MANIFEST})"
    tracked, fault = _tracked(save)
    folders = sorted(path for path in save.glob("iter_*") if only is None and _ITERATION.fullmatch(path.name))
    folders += [iteration_folder(save, number) for number in (only, tracked) if number is not None]
    present = (path for path in folders if path.is_symlink() or path.exists())
    foreign = next((path.name for path in present if not is_replaceable(path, is_ours)), None)
    if (save / TRACKER).is_symlink():
        what = f"has a symbolic link named {TRACKER}"
    elif foreign is not None:
        what = f"holds {foreign}, which is not a checkpoint of this program (but, for example, of Megatron-LM)"
    elif fault and not any(map(is_ours, folders)):
        what = f"holds {TRACKER} of another program"
    if what:
        raise CheckpointError(f"{named} {what}, so nothing can be saved there; choose another folder")


def is_replaceable(folder: Path, is_ours: Callable[[Path], bool] = is_own) -> bool:
    """Whether a new checkpoint may take the name of ``folder``; files of others in it then move to the new one."""
    return is_ours(folder) or (folder / REMAINS).is_file()


def refuse_other_checkpoints(setting: str, folder: Path, save: Path, runs: Collection[str]) -> None:
    """Check the fast-restart ``folder`` of a run that saves into ``save``, because each save there deletes all others.

    Raises ``CheckpointError`` if it is the folder ``save`` itself or has checkpoints of runs other than ``runs`` (ids).
    Checkpoints of earlier releases have no id; they are accepted in the default folder below ``save``.
    """
    what = "is the folder of --save" if real(folder) == real(save) else ""
    if not what and (folder / CONFIG).exists():
        what = f"is the --save folder of another run (it contains {CONFIG})"
    is_default = real(folder) == real(save / TEMPORARY_FOLDER)
    for number in () if what else complete_iterations(folder):
        path = iteration_folder(folder, number)
        text = b""
        with suppress(OSError):
            # The text is searched, not parsed: a damaged checkpoint of another run must not be deleted either.
            text = (path / MANIFEST).read_bytes()  # possibly damaged
        if not any(f'"run": "{run}"'.encode() in text for run in runs):
            has_run = b'"run": "' in text
            if is_default and not has_run:
                continue
            what = f"holds {path.name}, {'a checkpoint of another run' if has_run else 'a permanent checkpoint'}"
            break
    if what:
        raise CheckpointError(
            f"{setting}={str(folder)!r} {what}; saves for a fast restart would delete checkpoints there: choose "
            "another folder, or delete the checkpoints that are no longer needed"
        )


def complete_iterations(root: Path) -> list[int]:
    """The iterations of the complete checkpoints in ``root``, ascending."""
    numbers = (path.parent.name.removeprefix("iter_") for path in root.glob(f"iter_*/{MANIFEST}"))
    iterations = {int(number) for number in numbers if number.isascii() and number.isdigit()}
    return sorted(number for number in iterations if (iteration_folder(root, number) / MANIFEST).is_file())


@dataclass(frozen=True)
class Candidates:
    """The checkpoints to try, in this order."""

    folders: tuple[Path, ...] = ()
    named: bool = False
    """Whether the user asked for the first one explicitly, so that no other may replace it."""
    note: str = ""
    """A note about an unusual state of the folder."""


def find_candidates(load: str, step: int | None = None) -> Candidates:
    """The checkpoints in ``load``, newest first: only ``step`` if given, else the tracked iteration and earlier ones.

    ``load`` may also be the folder of a single iteration. If the tracker file is missing or damaged, or its checkpoint
    is gone, all complete checkpoints are returned.
    """
    root = location(load)
    if root.exists() and not root.is_dir():
        raise CheckpointError(f"load={load} is not a folder; give a --save folder of a training run")
    if (root / MANIFEST).is_file():
        return Candidates((root,), named=True)
    restore_replaced(root)
    complete = complete_iterations(root)
    # Iterations of other programs may have the same names, and are not incomplete checkpoints of this one.
    for form in () if complete else formats_in(root, resumes=True):
        raise CheckpointError(form.refusal(f"load={load}", root, step))
    tracked, fault = (step, "") if step is not None else _tracked(root)
    if tracked is None and not complete:
        # With a rank's file, a folder without a manifest is a damaged checkpoint, not an empty folder.
        folders = (root, *sorted(root.glob("iter_*")))
        incomplete = next((path for path in folders if any(path.glob("rank_*.safetensors"))), None)
        if incomplete is not None:
            # Objects have their final names from the start, and a job must restart without help.
            if in_storage(root) is not None and not fault and incomplete != root:
                return Candidates(note=f"{incomplete} has no {MANIFEST}: its save was interrupted")
            raise CheckpointError(f"{incomplete} has no {MANIFEST}, and there is no complete checkpoint in {root}")
        if not fault:
            return Candidates()
        raise CheckpointError(f"{root / TRACKER} {fault}; choose an iteration with --ckpt-step")
    if tracked is not None and tracked not in complete:
        there = ", ".join(iteration_folder(root, number).name for number in complete) or "none"
        if step is not None or not complete:
            folder = iteration_folder(root, tracked)
            foreign = folder.exists() and not is_own(folder)
            more = "; megatron-convert --from megatron converts those of Megatron-LM" if foreign else ""
            raise CheckpointError(f"{folder} is not a complete checkpoint; complete ones in {root}: {there}{more}")
        fault = f"names iteration {tracked}, which does not exist"
    if step is not None:
        return Candidates((iteration_folder(root, step),), named=True)
    # A lost tracker must not make a run start from scratch: manifests show which checkpoints are complete.
    if fault or tracked is None:
        note = f"{root / TRACKER} {fault or 'does not exist'}: loading the newest complete checkpoint in the folder"
        return Candidates(tuple(iteration_folder(root, number) for number in reversed(complete)), note=note)
    # The tracker decides, not the highest number: it is written last, and names what a save has completed. A newer
    # folder is only reported.
    before = [number for number in reversed(complete) if number <= tracked]
    newer = ""
    if complete[-1] > tracked:
        newest = iteration_folder(root, complete[-1]).name
        newer = f"{root} also has {newest}, newer than the one in {TRACKER}; load it with --ckpt-step {complete[-1]}"
    return Candidates(tuple(iteration_folder(root, number) for number in before), note=newer)


def find_checkpoint(load: str, step: int | None = None) -> Path | None:
    """The first of ``find_candidates``; None if there is none."""
    return next(iter(find_candidates(load, step).folders), None)


def _tracked(root: Path) -> tuple[int | None, str]:
    """The iteration in the tracker file, and a description of the fault if the file cannot be read."""
    try:
        if (root / TRACKER).exists() and not (root / TRACKER).is_file():
            return None, "is not a file"
        text = read_part(root / TRACKER, 0, 64).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        if in_storage(root) is not None:  # a failure of the service says nothing about the file
            raise
        return None, f"cannot be read: {error.strerror}"
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text), ""
    return None, f"holds {text!r} instead of an iteration number"


def track(save: Path, iteration: int) -> None:
    """Record ``iteration`` as the newest complete one in the tracker file."""
    replace_file(save / TRACKER, save / f".{TRACKER}", str(iteration).encode())


def restore_replaced(save: Path) -> None:
    """Give intact checkpoints their names back that a run was about to replace when it was killed.

    Without ``renameat2`` a save renames the old checkpoint before the new one. Ranks may call this at the same time,
    also while a run saves: the first rename succeeds, and the save repeats its own.
    """
    for hidden in () if in_storage(save) is not None else save.glob(".iter_*.replaced"):
        final = final_folder(hidden)
        if final is not None and not os.path.lexists(final) and _is_intact(hidden):
            with suppress(OSError):  # another rank was first, or the folder may only be read
                hidden.rename(final)


def final_folder(hidden: Path) -> Path | None:
    """The folder of the iteration to which a hidden folder belongs; None for other folders."""
    match = _HIDDEN.fullmatch(hidden.name)
    return None if match is None else hidden.with_name(match[1])


def _is_intact(folder: Path) -> bool:
    """Whether all files of a checkpoint are there: earlier releases also hid checkpoints that they deleted."""
    try:
        return not wrong_sizes(folder, Manifest.read(folder / MANIFEST).files)
    except (CheckpointError, ValueError):
        return is_own_distributed(folder)


class FolderLock:
    """An exclusive lock for writing checkpoints into a folder; the kernel releases it when the process ends.

    It is a POSIX record lock, which is not inherited by forked children and works over NFS. ``setting`` is the name of
    the setting with the folder. Errors: ``CheckpointError``, with the holder's name, if another process holds the lock.
    """

    def __init__(self, folder: Path, setting: str = "save") -> None:
        self.folder = folder
        self.setting = setting
        self.unsupported = ""
        """The error if the file system does not support locks."""
        self._file = no_follow(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
                self.release()
                raise CheckpointError(
                    f"{setting}={str(folder)!r}: another run writes its checkpoints there ({holder}); end it, or "
                    "choose another folder"
                ) from None
            self.unsupported = error.strerror or str(error)
            return
        # An empty file may be one that was created a moment ago; any other text belongs to another program.
        if os.pread(self._file, 8, 0).strip(b"\0") not in (b"", b"process "):
            self.release()
            raise CheckpointError(
                f"{setting}={str(folder)!r}: {LOCK} is a file of another program; choose another folder"
            )
        # Only the holder writes its name, so that a run that is refused reads who holds the lock.
        os.truncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    @property
    def is_there(self) -> bool:
        """Whether the locked file still exists in the folder."""
        return is_still_at(self._file, self.folder / LOCK)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)
