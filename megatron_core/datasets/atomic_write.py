"""Files that are either whole or not there: written under another name, then renamed."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_core.errors import DataError
from megatron_core.output_file import make_folder, no_follow

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file may not become larger here (a limit such as ulimit -f)",
}


class DiskFullError(DataError):
    """The disk had no more room; what was written before is kept for the same command to go on with."""


def partial_path(path: str | Path) -> Path:
    """The name a file has until it is whole."""
    return Path(f"{path}.partial")


def open_partial(path: Path, mode: Literal["wb", "r+b"] = "wb") -> BinaryIO:
    """Open a file that is not whole yet; a link is not followed."""
    return open(path, mode, opener=no_follow)


def commit(file: BinaryIO, path: str | Path) -> None:
    """Close the file opened at `partial_path(path)` and give it its name, once its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(partial_path(path), path)


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file to write to, which appears at `path` when the block ends and never if it fails.

    What is there and no file, such as /dev/null or a pipe, is written to as it is: root could replace it.
    """
    if Path(path).exists() and not Path(path).is_file():
        with Path(path).open("wb") as device:
            yield device
        return
    make_folder(Path(path).parent)
    file = open_partial(partial_path(path))
    try:
        with naming_full_disk(file):
            yield file
            commit(file, path)
    except BaseException:
        close_quietly(file)
        partial_path(path).unlink(missing_ok=True)
        raise


@contextmanager
def naming_full_disk(file: BinaryIO) -> Iterator[None]:
    """A disk that fills up while the file is written becomes a DataError that names file and byte."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        size = os.fstat(file.fileno()).st_size
        close_quietly(file)
        raise DiskFullError(
            f"{file.name}: {FULL[error.errno]} at byte {size:,}; free space and run the same command again: it goes on"
        ) from error


def sync_file(file: BinaryIO) -> None:
    """Return when all that was written to the file is on the disk."""
    with naming_full_disk(file):
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def syncing_file(file: BinaryIO) -> Iterator[None]:
    """Put what was written to the file on the disk while the block runs, and return when both are done."""
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(sync_file, file)
        yield
    written.result()


def start_writeback(file: BinaryIO) -> None:
    """Have the system begin to write what it holds of the file, and then forget it.

    Else a file of terabytes would push all others out of its memory, and the last `sync_file` would take long.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def close_quietly(file: BinaryIO) -> None:
    """Close a file whose buffered bytes no longer fit on the disk."""
    try:
        file.close()
    except OSError as error:
        if error.errno not in FULL:
            raise
