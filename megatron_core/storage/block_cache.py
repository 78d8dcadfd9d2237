"""A cache of blocks with a fixed size on the disk, shared by all processes of a machine."""

import fcntl
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from megatron_core.errors import ConfigError, DataError
from megatron_core.locations import CACHE_VARIABLE, cache_folder

SIZE_VARIABLE = "MEGATRON_STORAGE_CACHE_SIZE"
"""Environment variable with the largest size of the cache of tokens, such as 500G; default: no limit."""
# Data that does not fit is read in random order, so that a block rarely serves a second sample before it is replaced: a
# request of 256 KiB takes hardly longer than a shorter one.
BLOCK_BYTES = 1 << 18
# Slots in which a block can be; it replaces the one that was not used for the longest time.
WAYS = 8
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ENTRY = np.dtype([("key", "<u8", 2), ("checksum", "<u8"), ("used", "<u8")])


def size_limit() -> int | None:
    """Bytes of the limit; None without one. ConfigError: malformed."""
    text = os.environ.get(SIZE_VARIABLE)
    if not text:
        return None
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1] in _UNITS else (text, 1)
    if not (number.isascii() and number.isdigit()) or int(number) * unit < WAYS * BLOCK_BYTES:
        raise ConfigError(f"{SIZE_VARIABLE}={text} must be a number of bytes of at least 2M, such as 500G")
    return int(number) * unit


class BlockCache:
    """Blocks of objects in a file of `size` bytes. DataError: the disk has no room for it.

    A checksum in each entry of the table, which depends on the key, makes every inconsistency a miss: another process
    replaces the block during a read, a writer was killed, or the machine lost power.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._sets = size // (WAYS * BLOCK_BYTES)
        slots = self._sets * WAYS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("pool_*"):
                if not path.name.startswith(f"pool_{slots}_"):  # of another size
                    path.unlink(missing_ok=True)
            self._lock = folder / f"pool_{slots}_lock"
            self._lock.touch(mode=0o600)
            self._blocks = os.open(folder / f"pool_{slots}_blocks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Now, because a full disk would end a process that writes to the mapped table.
            os.posix_fallocate(self._blocks, 0, slots * BLOCK_BYTES)
            table = os.open(folder / f"pool_{slots}_table", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(table, 0, slots * _ENTRY.itemsize)
            with os.fdopen(table, "r+b") as file:
                self._table = np.memmap(file, _ENTRY, "r+", shape=(self._sets, WAYS))
        except OSError as error:
            raise DataError(
                f"the cache of {size:,} bytes in {folder} cannot be made: {error}; free space, set {CACHE_VARIABLE} to "
                f"another folder, or lower {SIZE_VARIABLE}"
            ) from None

    def read(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        """The block with this name, at most BLOCK_BYTES long; `fetch` gets it if it is not in the cache."""
        digest = xxh3_128_intdigest(name.encode())
        key = np.array([digest & (2**64 - 1), digest >> 64], np.uint64)
        number = digest % self._sets
        entries = self._table[number]
        for slot in np.flatnonzero((entries["key"] == key).all(axis=1)).tolist():
            data = os.pread(self._blocks, BLOCK_BYTES, (number * WAYS + slot) * BLOCK_BYTES)
            if _checksum(data, digest) == entries["checksum"][slot]:
                entries["used"][slot] = time.time_ns()
                return data
        data = fetch()
        padded = data.ljust(BLOCK_BYTES, b"\0")
        with self._lock.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            slot = int(entries["used"].argmin())
            entries["used"][slot] = time.time_ns()
            os.pwrite(self._blocks, padded, (number * WAYS + slot) * BLOCK_BYTES)
            entries["key"][slot] = key
            entries["checksum"][slot] = _checksum(padded, digest)
        return padded


def _checksum(data: bytes, digest: int) -> int:
    return xxh3_64_intdigest(data, digest & (2**64 - 1))


@cache
def block_cache(folder: Path, size: int) -> BlockCache:
    """The cache of a folder, once per process."""
    return BlockCache(folder, size)


def shared_cache() -> BlockCache | None:
    """The cache of this machine if its size is limited."""
    size = size_limit()
    return None if size is None else block_cache(cache_folder(), size)
