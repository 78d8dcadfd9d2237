"""Arrays kept between runs: found by what they are a function of, and either whole or not there."""

import hashlib
import json
import os
import re
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np

from megatron_core.output_file import make_folder, no_follow_new

# Part of every key: a change of what the arrays mean, or of how they are stored, makes the files of before unknown.
FORMAT = 1

# Files up to this size are compared with their checksum when they are opened (0.03 s for 64 MiB); larger ones, which
# would be read as a whole for it, by size, type and shape alone.
CHECKED_BYTES = 2**26

# A file that is being written and has not changed for so long was left by a job that was killed.
ABANDONED_SECONDS = 3600.0

_PARTIAL = re.compile(r"\.[0-9a-f]{32}-.+\.\d+-[0-9a-f]{16}\.partial")
"""The names of these files."""

Arrays = dict[str, np.ndarray]

# numpy parses a file's header as Python, which up to Python 3.12 is not safe in two threads at once: rarely, that ends
# in a SystemError about the "AST constructor recursion depth".
_PARSING = Lock()


class IndexCache:
    """A folder of arrays under content keys, or with folder None no cache at all.

    An entry is a file `KEY-NAME-ARRAY.npy` for each array and, written last, `KEY-NAME-description.txt`: JSON with all
    fields of the key, and the size, checksum, type and shape of each array. KEY is a hash of the fields and of the
    format's version, so another option is another entry. Files are written under names of their own and renamed:
    processes that build the same entry at once give it the same content, and none waits for another. A damaged entry
    is built again; if the folder cannot be written, the arrays stay in memory and one sentence on stderr reports it.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._may_write = True

    @property
    def in_use(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def get(self, name: str, key: dict[str, Any], arrays: Sequence[str], build: Callable[[], Arrays]) -> Arrays:
        """The named arrays of an entry, mapped from its files; if they are not there, built, and stored if possible.

        key: what the arrays are a function of, in values that JSON has.
        """
        if self._folder is None:
            return build()
        fields = {"format": FORMAT, "name": name, **key}
        prefix = f"{key_hash(fields)}-{name}"
        stored = self._load(prefix, fields, arrays)
        if stored is not None:
            return stored
        built = build()
        if not self._may_write:
            return built
        try:
            self._store(prefix, fields, built)
        except OSError as error:
            self._may_write = False
            # Not the error itself: it names a file that is another one every time.
            reason = error.strerror or type(error).__name__
            say_once(f"{self._folder}: the cache of the data order cannot be written ({reason}); going on in memory")
            return built
        return self._load(prefix, fields, arrays) or built

    def _load(self, prefix: str, fields: dict[str, Any], arrays: Sequence[str]) -> Arrays | None:
        """The arrays of a whole entry; None where there is none, after a word if there is a damaged one."""
        assert self._folder is not None
        path = self._folder / f"{prefix}-description.txt"
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            if description["key"] != fields:
                raise ValueError("it describes another entry")
            return {
                name: _load_array(self._folder / f"{prefix}-{name}.npy", description["arrays"][name]) for name in arrays
            }
        except (FileNotFoundError, NotADirectoryError) as error:
            if path.is_file():
                say_once(f"{error.filename} is missing beside its description; building it again")
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            say_once(f"{path}: this entry of the cache is damaged ({error}); building it again")
        return None

    def _store(self, prefix: str, fields: dict[str, Any], arrays: Arrays) -> None:
        assert self._folder is not None
        make_folder(self._folder)
        for path in self._folder.glob(".*.partial"):
            if not _PARTIAL.fullmatch(path.name):
                continue
            # Of a job that was killed: another one that is writing changed its file a moment ago.
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()
        described = {}
        for name, array in arrays.items():
            path = self._folder / f"{prefix}-{name}.npy"
            size, checksum = _write(path, partial(np.save, arr=array, allow_pickle=False))
            described[name] = {"bytes": size, "crc32": checksum, "dtype": array.dtype.str, "shape": list(array.shape)}
        text = json.dumps({"key": fields, "arrays": described}, indent=4).encode()
        _write(self._folder / f"{prefix}-description.txt", lambda file: file.write(text))


def key_hash(fields: dict[str, Any]) -> str:
    """32 hexadecimal digits of a description's fields, whatever their order."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


@cache
def say_once(sentence: str) -> None:
    """A sentence on stderr, the first time in this process."""
    print(sentence, file=sys.stderr, flush=True)


def _write(path: Path, fill: Callable[[BinaryIO], Any]) -> tuple[int, int]:
    """Write a file under another name and rename it; its size, and its checksum if it is small enough to be checked."""
    # Unlike a fixed name, this one is no other writer's, in this process, on this node, or on another.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "wb", opener=no_follow_new) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        size, checksum = partial.stat().st_size, _checksum(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size, checksum


def _load_array(path: Path, expected: dict[str, Any]) -> np.ndarray:
    """An array mapped from its file; ValueError where it is not as its description says."""
    found: dict[str, Any] = {"bytes": path.stat().st_size, "crc32": _checksum(path)}
    for field, value in found.items():
        if value != expected[field]:
            raise ValueError(f"{path.name} has {field} {value}, expected {expected[field]}")
    with _PARSING:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.str != expected["dtype"] or list(array.shape) != expected["shape"]:
        raise ValueError(
            f"{path.name} is {array.dtype.str} {list(array.shape)}, expected {expected['dtype']} {expected['shape']}"
        )
    # A plain view of the mapping: reading one number from a memmap itself takes ten times as long.
    return np.asarray(array)


def _checksum(path: Path) -> int:
    """CRC-32 of a file of up to CHECKED_BYTES, 0 of a larger one."""
    return zlib.crc32(path.read_bytes()) if path.stat().st_size <= CHECKED_BYTES else 0
