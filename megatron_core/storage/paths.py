"""Files in object storage, such as ``s3://bucket/folder``, through fsspec.

Every error of a service is an ``OSError`` whose text says what to do.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from glob import escape, has_magic
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_core.errors import ConfigError, shortened
from megatron_core.locations import ObjectPath, cache_folder
from megatron_core.storage.block_cache import shared_cache
from megatron_core.storage.tokens import LimitedTokens, StreamedTokens

READ_BYTES = 2**25
"""Bytes of one request while a file is read from start to end."""
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""Packages of schemes; fsspec's message names those of others."""


@dataclass(frozen=True)
class Status:
    """The part of ``os.stat_result`` that an object has."""

    st_size: int


class StoragePath(ObjectPath):
    """An object or a folder of objects. A folder exists as long as it has an object."""

    def __init__(self, url: str) -> None:
        self.scheme, _, key = url.partition("://")
        self._key = "/".join(name for name in key.split("/") if name)
        # The process is a part of the key: after a fork, a child needs connections of its own.
        self._files = _file_system(self.scheme, os.getpid())

    def __str__(self) -> str:
        return f"{self.scheme}://{self._key}"

    def __repr__(self) -> str:
        return f"StoragePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoragePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: StoragePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str | PurePosixPath) -> StoragePath:
        return StoragePath(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> StoragePath:
        """The folder of the object."""
        return StoragePath(f"{self.scheme}://{self._key.rpartition('/')[0]}")

    def with_name(self, name: str) -> StoragePath:
        """The path with another last part."""
        return self.parent / name

    def with_suffix(self, suffix: str) -> StoragePath:
        """The path with another suffix."""
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Nothing: a folder exists once it has an object."""

    def absolute(self) -> StoragePath:
        """The path itself."""
        return self

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link: never."""
        return False

    def exists(self) -> bool:
        """Whether the object or folder exists."""
        return bool(self._files.exists(self))

    def is_file(self) -> bool:
        """Whether the object exists."""
        try:
            # isfile answers no when the service fails.
            return bool(self._files.info(self)["type"] == "file")
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether there are objects in the folder."""
        return bool(self._files.isdir(self))

    def stat(self) -> Status:
        """The object's size. Errors: ``FileNotFoundError``."""
        return Status(int(self._files.info(self)["size"]))

    def version(self) -> str:
        """A text that changes when the object is written again."""
        return str(self._files.ukey(self))

    def iterdir(self) -> Iterator[StoragePath]:
        """The objects and folders in the folder."""
        names = self._files.ls(self, detail=False)
        return (path for path in map(self._with_key, names) if path != self)

    def glob(self, pattern: str) -> Iterator[StoragePath]:
        """The objects and folders that match."""
        with _named(self):
            names = self._files.files.glob(f"{self.scheme}://{escape(self._key)}/{pattern}")
        return map(self._with_key, sorted(names))

    def objects(self, pattern: str | None = None) -> list[StoragePath]:
        """The objects that match, and those in and below folders that match (None: in this one), as ``os.walk`` sorts
        them."""
        matches = {self._key: {"type": "directory"}}
        if pattern is not None:
            with _named(self):
                matches = self._files.files.glob(f"{self.scheme}://{escape(self._key)}/{pattern}", detail=True)
        paths: list[StoragePath] = []
        for key, about in sorted(matches.items()):
            path = self._with_key(key)
            names = path.files() if about["type"] == "directory" else []
            paths += [path / name for name in sorted(names, key=lambda name: (name.split("/")[:-1], name))]
            paths += [path] if about["type"] == "file" else []
        return paths

    def _with_key(self, key: str) -> StoragePath:
        return StoragePath(f"{self.scheme}://{key}")

    def read_bytes(self) -> bytes:
        """The whole content."""
        return bytes(self._files.cat_file(self))

    def read_text(self) -> str:
        """The whole content, decoded from UTF-8."""
        return self.read_bytes().decode()

    def read_range(self, start: int, length: int) -> bytes:
        """``length`` bytes from byte ``start`` on, fewer at the end of the object."""
        return bytes(self._files.cat_file(self, start=start, end=start + length)) if length else b""

    def write_bytes(self, data: bytes) -> None:
        """Write the object at once."""
        self._files.pipe_file(self, data)

    def write_text(self, text: str) -> None:
        """Write the object at once, encoded as UTF-8."""
        self.write_bytes(text.encode())

    def writer(self) -> StorageWriter:
        """A file for a large object, which is sent in parts."""
        return StorageWriter(self)

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            self._files.rm_file(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def files(self) -> set[str]:
        """The names of all objects in the folder and its folders, relative to it."""
        try:
            keys = self._files.find(self)
        except FileNotFoundError:
            return set()
        return {str(self._with_key(key)).removeprefix(f"{self}/") for key in keys}

    def remove_tree(self) -> None:
        """Delete all objects in the folder; errors are ignored, as by ``shutil.rmtree(ignore_errors=True)``."""
        with suppress(OSError):
            if has_magic(self._key):  # rm would take it as a pattern, which other folders may match
                for key in self._files.find(self):
                    self._files.rm_file(key)
            elif self._files.exists(self):
                self._files.rm(self, recursive=True)

    def local_copy(self) -> Path:
        """The copy in the cache of this machine, which is made once per version; of a folder, the objects directly in
        it."""
        if not self.is_file():
            copies = [path.local_copy() for path in self.iterdir()]
            folder = _cached(str(self), " ".join(map(str, copies))) / self.name
            folder.mkdir(parents=True, exist_ok=True)
            for copy in copies:
                with suppress(FileExistsError):
                    (folder / copy.name).symlink_to(copy)
            return folder
        copy = self.cached_folder() / self.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Under another name until it is complete: other ranks of the machine take the copy as soon as it has its
            # name.
            with tempfile.NamedTemporaryFile(dir=copy.parent, delete=False) as file:
                try:
                    for start in range(0, self.stat().st_size, READ_BYTES):
                        file.write(self.read_range(start, READ_BYTES))
                    file.close()
                    os.replace(file.name, copy)
                except BaseException:
                    os.unlink(file.name)
                    raise
        return copy

    def cached_folder(self) -> Path:
        """Folder in the cache of this machine for the present version of the object."""
        return _cached(str(self), self.version())

    def open_tensors(self) -> Any:
        """The object with the interface of ``safetensors.safe_open``."""
        from megatron_core.storage.tensors import TensorsInStorage  # it imports torch

        return TensorsInStorage(self)

    def open_tokens(self) -> StreamedTokens | LimitedTokens:
        """The object in blocks that are kept on this machine."""
        blocks = shared_cache()
        return StreamedTokens(self) if blocks is None else LimitedTokens(self, blocks)


class StorageWriter:
    """Writes an object of any size in sequence, which appears when it is closed."""

    def __init__(self, path: StoragePath) -> None:
        self._path, self._is_open = path, True
        self._file = path._files.open(path, "wb")

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``; return its number of bytes."""
        with _named(self._path):
            return int(self._file.write(data))

    def close(self) -> None:
        """Complete the object."""
        with _named(self._path):
            self._file.close()
        self._is_open = False

    def discard(self) -> None:
        """Give up the object, unless it is closed."""
        if self._is_open:
            with suppress(Exception):  # the first error is the cause, and the service drops parts by itself
                self._file.discard()
            with suppress(AttributeError):  # files in memory have no such state
                self._file.closed = True  # otherwise it would be sent when it is collected
            self._is_open = False


def _cached(url: str, version: str) -> Path:
    return cache_folder() / hashlib.sha256(f"{url} {version}".encode()).hexdigest()[:32]


@cache
def _file_system(scheme: str, process: int) -> _Service:
    """The file system of a scheme, once per process: after a fork the connections of the parent are unusable."""
    import fsspec

    try:
        # Without cached listings: other hosts write objects that this one must see.
        return _Service(fsspec.filesystem(scheme, use_listings_cache=False))
    except ImportError as error:
        install = f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else "install it"
        raise ConfigError(f"{scheme}:// needs another package ({shortened(str(error))}); {install}") from None
    except ValueError:
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "file", "memory"))
        raise ConfigError(f"{scheme}:// is not supported; give a folder, or a URL of {known}") from None


class _Service:
    """A file system of fsspec whose errors are ``OSError``; each method takes a path first."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.files, name)

        def call(path: object, *arguments: Any, **keywords: Any) -> Any:
            with _named(path):
                return method(str(path), *arguments, **keywords)

        return call


@contextmanager
def _named(path: object) -> Iterator[None]:
    """Turn every exception of a service into an ``OSError`` with the path and the way out."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, _first(error) or "no such object", str(path)) from None
    except PermissionError as error:
        raise PermissionError(
            errno.EACCES,
            f"access was denied ({_first(error)}); check the credentials and their rights for this bucket",
            str(path),
        ) from None
    except Exception as error:  # each service has exceptions of its own
        # A request for the size of an object has an answer without a text.
        hint = ", as S3 answers to expired credentials" if "Bad Request" in str(error) else ""
        raise OSError(
            errno.EIO,
            f"the object storage failed ({type(error).__name__}: {_first(error)}{hint}); check the network, the "
            "endpoint and the credentials",
            str(path),
        ) from None


def _first(error: BaseException) -> str:
    lines = str(error).splitlines()
    return shortened(re.sub(r"\s+", " ", lines[0])) if lines else ""
