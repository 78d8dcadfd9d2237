"""A cache of arrays on disk, keyed by the inputs they are computed from; entries are complete or absent."""

import hashlib
import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np

from megatron_core.output_file import make_folder
from megatron_core.prepared_output import no_follow_new
from megatron_core.terminal import print_once

# Part of every key: change it with the meaning or format of the arrays, so that older files are ignored.
FORMAT = 1

# Files up to this size are verified by checksum when opened (0.03 s for 64 MiB); larger ones, which would have to be
# read completely, only by size, dtype and shape.
CHECKED_BYTES = 2**26

# Temporary files that have not changed for this long are left over from a killed job.
ABANDONED_SECONDS = 3600.0

_PARTIAL = re.compile(r"\.[0-9a-f]{32}-.+\.\d+-[0-9a-f]{16}\.partial")
"""Pattern of the names of these files."""

Arrays = dict[str, np.ndarray]

# numpy parses a file's header as Python, which up to Python 3.12 is not thread-safe: it rarely raises a SystemError
# about the "AST constructor recursion depth".
_PARSING = Lock()


class IndexCache:
    """A folder of arrays under content keys; with folder None nothing is cached.

    An entry is a file `KEY-NAME-ARRAY.npy` per array and, written last, `KEY-NAME-description.txt`: JSON with all
    fields of the key, and the size, checksum, dtype and shape of each array. KEY is a hash of the fields and the
    format's version, so other options give other entries. Files are written under unique names and renamed: processes
    that build the same entry at once write the same content, without waiting for each other. A damaged entry is
    rebuilt; if the folder cannot be written, the arrays stay in memory and a warning is printed on stderr.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._may_write = True

    @property
    def in_use(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def get(self, name: str, key: dict[str, Any], arrays: Sequence[str], build: Callable[[], Arrays]) -> Arrays:
        """The named arrays of an entry, mapped from its files, or built and, if possible, stored.

        key: the values that determine the arrays, as JSON types.
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
            # The error itself is not printed, because the file name in it differs every time.
            reason = error.strerror or type(error).__name__
            print_once(
                f"{self._folder}: the cache of the data order cannot be written ({reason}); continuing in memory"
            )
            return built
        return self._load(prefix, fields, arrays) or built

    def _load(self, prefix: str, fields: dict[str, Any], arrays: Sequence[str]) -> Arrays | None:
        """The arrays of a complete entry; None if there is none, with a warning if it is damaged."""
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
                print_once(f"{error.filename} is missing; rebuilding this entry of the cache")
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            print_once(f"{path}: this entry of the cache is damaged ({error}); rebuilding it")
        return None

    def _store(self, prefix: str, fields: dict[str, Any], arrays: Arrays) -> None:
        assert self._folder is not None
        make_folder(self._folder)
        for path in self._folder.glob(".*.partial"):
            if not _PARTIAL.fullmatch(path.name):
                continue
            # Left over from a killed job: an active writer would have changed its file recently.
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
    """A hash of 32 hexadecimal digits of a description's fields, in any order."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def _write(path: Path, fill: Callable[[BinaryIO], Any]) -> tuple[int, int]:
    """Write a file under a temporary name and rename it; returns its size, and its checksum if it is small enough."""
    # A unique name, so that no other thread, process or node writes the same file.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "wb", opener=no_follow_new) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        size = partial.stat().st_size
        checksum = _checksum(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size, checksum


def _load_array(path: Path, expected: dict[str, Any]) -> np.ndarray:
    """An array mapped from its file; ValueError if it differs from its description."""
    actual: dict[str, Any] = {"bytes": path.stat().st_size, "crc32": _checksum(path)}
    for field, value in actual.items():
        if value != expected[field]:
            raise ValueError(f"{path.name} has {field} {value}, expected {expected[field]}")
    with _PARSING:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.str != expected["dtype"] or list(array.shape) != expected["shape"]:
        raise ValueError(
            f"{path.name} is {array.dtype.str} {list(array.shape)}, expected {expected['dtype']} {expected['shape']}"
        )
    # A plain array view: reading one number from a memmap takes ten times as long.
    return np.asarray(array)


def _checksum(path: Path) -> int:
    """CRC-32 of a file of up to CHECKED_BYTES, 0 for a larger one."""
    return zlib.crc32(path.read_bytes()) if path.stat().st_size <= CHECKED_BYTES else 0
