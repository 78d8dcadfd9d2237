"""Files that are either complete or absent: written under a temporary name, then renamed."""

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_core.errors import DataError
from megatron_core.output_file import make_folder, new_file, no_follow

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file may not become larger here (a limit such as ulimit -f)",
}


class DiskFullError(DataError):
    """The disk is full; data written so far is kept, and the same command continues from it."""


def partial_path(path: str | Path) -> Path:
    """The temporary name of an incomplete file."""
    return Path(f"{path}.partial")


def open_partial(path: Path, mode: Literal["wb", "r+b"] = "wb") -> BinaryIO:
    """Open an incomplete file; symbolic links are not followed."""
    return open(path, mode, opener=no_follow)


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """`new_file`; a full disk is a DiskFullError."""
    make_folder(Path(path).parent)
    with new_file(Path(path)) as file, naming_full_disk(file):
        yield file
        file.flush()
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fsync(file.fileno())


@contextmanager
def naming_full_disk(file: BinaryIO) -> Iterator[None]:
    """Turn a full disk during writing into a DataError with the file name and byte position."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        size = os.fstat(file.fileno()).st_size
        close_quietly(file)
        raise DiskFullError(
            f"{file.name}: {FULL[error.errno]} at byte {size:,}; free space and run the same command again: it "
            "continues"
        ) from error


def sync_file(file: BinaryIO) -> None:
    """Flush the file to disk."""
    with naming_full_disk(file):
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def syncing_file(file: BinaryIO) -> Iterator[None]:
    """Flush the file to disk while the block runs; returns when both are done."""
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(sync_file, file)
        yield
    written.result()


def start_writeback(file: BinaryIO) -> None:
    """Start writing cached data of the file to disk, then drop it from the page cache.

    Otherwise a file of terabytes would displace all other files from the cache, and the last `sync_file` would be slow.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def close_quietly(file: BinaryIO) -> None:
    """Close a file even if its buffered bytes no longer fit on the disk."""
    try:
        file.close()
    except OSError as error:
        if error.errno not in FULL:
            raise
