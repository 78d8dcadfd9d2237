"""Deletes and replaces checkpoints; files of others in their folders are kept.

A new checkpoint of an iteration exchanges its name with the old one in one step, so that one of them always has it.
"""

import ctypes
import errno
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from megatron_core.checkpoint.folder import (
    DISTRIBUTED_STATE,
    REMAINS,
    complete_iterations,
    final_folder,
    is_own,
    is_replaceable,
    iteration_folder,
    restore_replaced,
)
from megatron_core.checkpoint.manifest import MANIFEST, Manifest
from megatron_core.errors import CheckpointError
from megatron_core.locations import in_storage
from megatron_core.parallel.texts import listed

_TEMPORARY = re.compile(r"rank_\d{5,}\.(report|unreported)|save_id")
_NATIVE = re.compile(rf"rank_\d{{5,}}\.safetensors|{re.escape(MANIFEST)}|tokenizer/.+|{_TEMPORARY.pattern}")
_DISTRIBUTED = re.compile(rf"__\d+_0\.distcp|{re.escape(DISTRIBUTED_STATE)}|\.metadata(\.tmp)?|metadata\.json")
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of file systems and systems that cannot exchange two names."""
_EXCHANGE, _RELATIVE_TO_CURRENT = 2, -100
"""RENAME_EXCHANGE and AT_FDCWD of Linux."""
_ATTEMPTS = 10


def files_below(folder: Path) -> set[str]:
    """The relative names of all files and symbolic links in a folder; links are not followed."""
    remote = in_storage(folder)
    if remote is not None:
        return remote.files()
    files = set[str]()
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        files |= {os.path.relpath(os.path.join(parent, name), folder) for name in (*names, *links)}
    return files


def own_files(folder: Path) -> set[str]:
    """The relative names of the files in a folder of a checkpoint that this program wrote, complete or not.

    A manifest names them. Without one, they are recognized by their names.
    """
    files = files_below(folder)
    for name in (MANIFEST, REMAINS):
        with suppress(CheckpointError):
            named = {*Manifest.read(folder / name).files, MANIFEST, REMAINS}
            return {name for name in files if name in named or _TEMPORARY.fullmatch(name)}
    names = _NATIVE if any(map(_NATIVE.fullmatch, files)) else _DISTRIBUTED
    return {name for name in files if names.fullmatch(name) or name == REMAINS}


def give_name(partial: Path, final: Path, is_ours: Callable[[Path], bool] = is_own) -> Path:
    """Give a complete checkpoint its final name; return the hidden folder to ``discard``, with the old checkpoint.

    ``is_ours`` recognizes checkpoints of the format. Errors: ``CheckpointError`` if ``final`` is not one of them.
    """
    # A killed run may have hidden the checkpoint of this iteration under the name that is discarded next.
    restore_replaced(final.parent)
    replaced = final.with_name(f".{final.name}.replaced")
    delete_hidden(replaced)
    for _ in range(_ATTEMPTS):
        if not os.path.lexists(final):
            partial.rename(final)
            return replaced
        if not is_replaceable(final, is_ours):
            raise CheckpointError(f"{final} is not a checkpoint of this program, so it is not replaced; move it away")
        # Exchanging the names leaves no moment without a checkpoint of this iteration; two renames do.
        if _exchange(partial, final):
            return partial
        final.rename(replaced)
        try:
            partial.rename(final)
            return replaced
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # those: `restore_replaced` of a reader was faster
                replaced.rename(final)
                raise
    raise CheckpointError(f"{final} is created again and again by another program; end it")


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; whether the system and the file system support it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    directory = _RELATIVE_TO_CURRENT
    if rename(directory, os.fsencode(first), directory, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def remove(folder: Path) -> None:
    """Delete a checkpoint of this program; other files in its folder are kept, with a note.

    It is hidden first, because a partly deleted folder still has its manifest. The manifest of objects, which cannot be
    renamed, and of folders with other files is deleted first.
    """
    if not is_own(folder):
        return
    deleted = own_files(folder)
    foreign = files_below(folder) - deleted
    if not foreign and in_storage(folder) is None:
        hidden = folder.with_name(f".{folder.name}.removed")
        delete_hidden(hidden)
        folder.rename(hidden)
        delete_hidden(hidden)
        return
    if foreign:
        with suppress(FileNotFoundError):
            # If the run is killed here, the next one reads from this copy which files it has still to delete.
            (folder / REMAINS).write_bytes((folder / MANIFEST).read_bytes())
        _report(folder, foreign)
    (folder / MANIFEST).unlink(missing_ok=True)
    _delete(folder, deleted - {REMAINS})
    if foreign:
        # Empty: nothing is left to delete, but the folder may still take a new checkpoint of the iteration.
        (folder / REMAINS).write_bytes(b"")


def delete_hidden(hidden: Path) -> None:
    """Delete a hidden folder of a checkpoint, of a symbolic link only the link itself.

    Files of others move to the folder of the iteration, with a note.
    """
    if hidden.is_symlink():
        hidden.unlink()
        return
    if not hidden.is_dir():
        return
    deleted = own_files(hidden)
    foreign = files_below(hidden) - deleted
    final = final_folder(hidden)
    if foreign and final is not None and in_storage(hidden) is None:
        final.mkdir(exist_ok=True)
        if not (final / MANIFEST).exists() and not (final / DISTRIBUTED_STATE).exists():
            # Marks the folder as one whose name a new checkpoint of the iteration may take.
            (final / REMAINS).touch()
        for name in sorted(foreign):
            _move(hidden / name, final / name)
        _report(final, foreign)
    _delete(hidden, deleted)


def _move(source: Path, target: Path) -> None:
    """Move a file; another name is chosen if the target exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    free = target
    while os.path.lexists(free):
        free = target.with_name(f"{target.name}.{number}")
        number = number + 1
    source.rename(free)


def _report(folder: Path, foreign: Collection[str]) -> None:
    print(f"note: {folder} keeps {listed(sorted(foreign))}: not of the deleted checkpoint", flush=True)


def _delete(folder: Path, names: set[str]) -> None:
    """Delete these files, then folders that are empty. Errors are ignored: the next start tries again."""
    remote = in_storage(folder)
    if remote is not None and names == files_below(folder):
        remote.remove_tree()  # one request for many objects
        return
    for name in names:
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
    for parent, _, _ in () if remote is not None else os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(parent)


def remove_hidden(save: Path) -> None:
    """Finish what killed runs began: restore replaced checkpoints without a successor, delete other hidden folders.

    The caller must hold the folder's lock.
    """
    restore_replaced(save)
    for hidden in save.glob(".iter_*"):
        if final_folder(hidden) is not None:
            delete_hidden(hidden)
    for manifest in save.glob(f"iter_*/{REMAINS}"):
        folder = manifest.parent
        # A manifest under this name lists the files of a deletion that did not end.
        if not (folder / MANIFEST).exists() and manifest.stat().st_size:
            _delete(folder, own_files(folder) - {REMAINS})
            manifest.write_bytes(b"")


def drop_old(save: Path, newest: int, *, keep_last: int | None, keep_every: int | None) -> None:
    """Delete checkpoints before ``newest``, except the last ``keep_last`` (``newest`` included) and multiples of
    ``keep_every``; delete none if both are None."""
    if keep_last is None and keep_every is None:
        return
    upto = [number for number in complete_iterations(save) if number <= newest]
    recent: Collection[int] = upto[-(keep_last or 1) :]
    for number in upto:
        if number not in recent and (keep_every is None or number % keep_every):
            remove(iteration_folder(save, number))
