"""Reads a token file in object storage block by block, and keeps the blocks in the cache of this machine."""

import os
from functools import partial
from mmap import ACCESS_READ
from mmap import mmap as mapping
from pathlib import Path
from typing import BinaryIO, cast

from megatron_core.errors import DataError
from megatron_core.locations import CACHE_VARIABLE, ObjectPath
from megatron_core.storage.block_cache import BLOCK_BYTES as SMALL_BLOCK
from megatron_core.storage.block_cache import BlockCache

BLOCK_BYTES = 2**22
"""Bytes of one request. Samples are read in random order, so a block serves other samples later."""


class StreamedTokens:
    """The bytes of an object; a context for all ranks of a machine, which share the blocks.

    The cached file is sparse and has the size of the object; a second file has one byte for each block, which is 1 once
    the block is on disk. Both are mapped, so that ranks see each other's blocks; two that fetch the same block write
    the same bytes. Errors: ``DataError`` if the storage or the cache fails.
    """

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        try:
            self.size = cast(Path, path).stat().st_size
            folder = path.cached_folder()
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _sized(folder / "blocks", self.size)
            self._data = mapping(self._file.fileno(), 0, access=ACCESS_READ)
            with _sized(folder / f"present_{BLOCK_BYTES}", -(-self.size // BLOCK_BYTES)) as present:
                self._present = mapping(present.fileno(), 0)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}; {_WAY_OUT}") from None

    def read(self, position: int, length: int) -> memoryview:
        """``length`` bytes from byte ``position`` on, which must be inside the object; missing blocks are fetched."""
        if length:
            for block in range(position // BLOCK_BYTES, (position + length - 1) // BLOCK_BYTES + 1):
                if not self._present[block]:
                    self._fetch(block)
        return memoryview(self._data)[position : position + length]

    def _fetch(self, block: int) -> None:
        start = block * BLOCK_BYTES
        try:
            data = self.path.read_range(start, min(BLOCK_BYTES, self.size - start))
            if len(data) != min(BLOCK_BYTES, self.size - start):
                raise DataError(f"{self.path} was replaced while it was read; start again")
            # Not through the mapping, where a full disk would kill the process.
            os.pwrite(self._file.fileno(), data, start)
            os.fdatasync(self._file.fileno())
            self._present[block] = 1
        except OSError as error:
            raise DataError(f"{self.path} cannot be read at byte {start}: {error}; {_WAY_OUT}") from None


class LimitedTokens:
    """As `StreamedTokens`, in a cache of limited size."""

    def __init__(self, path: ObjectPath, blocks: BlockCache) -> None:
        self.path = path
        self._blocks = blocks
        try:
            self.size = cast(Path, path).stat().st_size
            self._version = path.cached_folder().name  # depends on the URL, too
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}; {_WAY_OUT}") from None

    def read(self, position: int, length: int) -> bytes:
        """``length`` bytes from byte ``position`` on, which must be inside the object."""
        first = position // SMALL_BLOCK
        numbers = range(first, -(-(position + length) // SMALL_BLOCK))
        data = b"".join(self._blocks.read(f"{self._version} {n}", partial(self._fetch, n)) for n in numbers)
        start = position - first * SMALL_BLOCK
        return data[start : start + length]

    def _fetch(self, block: int) -> bytes:
        start = block * SMALL_BLOCK
        try:
            data = self.path.read_range(start, min(SMALL_BLOCK, self.size - start))
        except OSError as error:
            raise DataError(f"{self.path} cannot be read at byte {start}: {error}; {_WAY_OUT}") from None
        if len(data) != min(SMALL_BLOCK, self.size - start):
            raise DataError(f"{self.path} was replaced while it was read; start again")
        return data


_WAY_OUT = f"restore the access, or free space in the cache (environment variable {CACHE_VARIABLE})"


def _sized(path: Path, size: int) -> BinaryIO:
    """An open file of at least ``size`` bytes and 1, filled up with zeros; other processes may have it open."""
    # Neither truncated, because another process may have mapped it, nor for appending, where pwrite ignores its offset.
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
    if os.fstat(file.fileno()).st_size < max(size, 1):
        os.ftruncate(file.fileno(), max(size, 1))
    return file
