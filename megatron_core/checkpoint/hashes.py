"""Content hashes of checkpoint files: 128-bit XXH3, computed while writing and compared when reading."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from xxhash import xxh3_128

from megatron_core.locations import in_storage
from megatron_core.output_file import no_follow

HASH = "xxh3_128"
READ_BYTES = 2**23
"""Bytes read and hashed at a time."""
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class StoredFile:
    """Expected size and hash of a file."""

    size: int
    hash: str


class _DiskFile:
    """A new file on disk."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", opener=no_follow)  # noqa: SIM115 (closed by `close` or `discard`)
        self._size = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data`` and start writing it to disk immediately if the system supports it.

        Hashing then overlaps with the disk, and ``close`` waits less (300 MB: 0.47 s instead of 0.54 s).
        """
        start = self._size
        self._size += self._file.write(data)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), start, len(data), os.POSIX_FADV_DONTNEED)
        return self._size - start

    def close(self) -> None:
        """Flush the file to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Close an incomplete file."""
        self._file.close()


class HashingFile(AbstractContextManager["HashingFile"]):
    """Hashes a new file or object while writing it; a context manager. It is stored after ``close``."""

    def __init__(self, path: Path) -> None:
        remote = in_storage(path)
        self._file = _DiskFile(path) if remote is None else remote.writer()
        self._hash = xxh3_128()
        self._size = 0

    def __exit__(self, *error: object) -> None:
        self._file.discard()

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        self._hash.update(data)
        self._size += self._file.write(data)

    def close(self) -> StoredFile:
        """Complete the file; returns its size and hash."""
        self._file.close()
        return StoredFile(self._size, self._hash.hexdigest())


def write_file(path: Path, data: bytes) -> StoredFile:
    """Write a file to disk."""
    with HashingFile(path) as file:
        file.write(data)
        return file.close()


def sync_folder(folder: Path) -> None:
    """Flush changed names in ``folder`` to disk: files created, renamed or deleted. Objects are stored at once."""
    if in_storage(folder) is not None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inside(folder: Path, name: str) -> Path:
    """The path of the file ``name`` in ``folder``; ``ValueError`` if it is outside the folder, also through links."""
    names = PurePosixPath(name).parts
    plain = "\\" not in name and "\0" not in name and "/".join(names) == name
    if not names or not plain or name.startswith("/") or ".." in names:
        raise ValueError(f"the file {name[:200]!r} is not a path inside the folder")
    path = folder
    for component in names:
        path = path / component
        # A name comes from the manifest, which anyone may have written: a link could lead out of the folder although
        # the name does not.
        if path.is_symlink():
            raise ValueError(f"{name[:200]!r} goes through a symbolic link; files must be in the folder itself")
    return path


def content_hash(path: Path) -> str:
    """The hash of a file's content."""
    digest = xxh3_128()
    buffer = bytearray(READ_BYTES)
    remote = in_storage(path)
    if remote is not None:
        for start in range(0, path.stat().st_size, READ_BYTES):
            digest.update(remote.read_range(start, READ_BYTES))
        return digest.hexdigest()
    # Unbuffered: Python's buffer would copy each byte once more.
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def damage(folder: Path, files: Mapping[str, StoredFile], *, share: int = 0, shares: int = 1) -> dict[str, str]:
    """A sentence, by name, for each of ``files`` that differs from the manifest; several files are read in parallel.

    With several callers, caller ``share`` of ``shares`` checks a part of about equal size, so that each byte is read
    once.
    """
    share_of_files = dict(_share(files, share, shares))
    with ThreadPoolExecutor(THREADS) as pool:
        faults = pool.map(lambda item: _fault(folder, *item), share_of_files.items())
        return {name: fault for name, fault in zip(share_of_files, faults, strict=True) if fault}


def _share(files: Mapping[str, StoredFile], share: int, shares: int) -> Iterable[tuple[str, StoredFile]]:
    loads = [0] * shares
    # Largest files first, each to the share with the fewest bytes: every caller computes the same shares without a
    # message. An empty file counts as one byte, or all of them would be in one share.
    for name, file in sorted(files.items(), key=lambda item: (-item[1].size, item[0])):
        least = loads.index(min(loads))
        loads[least] += file.size + 1
        if least == share:
            yield name, file


def wrong_sizes(folder: Path, files: Mapping[str, StoredFile]) -> list[str]:
    """A sentence for each of ``files`` that is missing or has the wrong size; contents are not read."""
    return [fault for name, file in files.items() if (fault := _wrong_size(inside(folder, name), file))]


def _wrong_size(path: Path, expected: StoredFile) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if size == expected.size else f"{path} has {size} bytes instead of {expected.size}"


def _fault(folder: Path, name: str, expected: StoredFile) -> str | None:
    path = inside(folder, name)
    if fault := _wrong_size(path, expected):
        return fault
    try:
        return None if content_hash(path) == expected.hash else f"{path} is damaged: its hash differs"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
