"""Find the input files of a run and read their decompressed bytes."""

import errno
import glob
import gzip
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import zstandard

from megatron_core.errors import ConfigError, DataError
from megatron_core.locations import in_storage, location, path_of
from megatron_core.preprocess.atomic_write import naming_full_disk, sync_file

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER_BYTES = 1 << 18
REQUEST_BYTES = 1 << 22
"""Largest request to object storage."""
# Compressed bytes per decompression step: zstd compresses zeros 17,000 to 1, so a step returns up to about 256 MiB.
COMPRESSED_BYTES = 1 << 14
# A file is refused if it expands to more than EXPANDED_BYTES and more than EXPANSION times its size. Deflate reaches
# 1,030 to 1 and zstd 17,000 to 1 for repeated bytes; text is compressed 3 to 1 up to 10 to 1.
EXPANDED_BYTES = 1 << 22
EXPANSION = 500
# Suffixes of this tool's output, which may be in the folder of the input.
TOKEN_FILES = (".bin", ".idx", ".partial")
KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class DamagedFileError(DataError):
    """An input file cannot be read to its end, or its content does not match its suffix."""


class UnreachableFileError(DataError):
    """The storage of an input file fails; the saved progress is kept, and the same command resumes from it."""


@dataclass(frozen=True)
class InputFile:
    """One input file.

    path: path, or URL of an object. format: jsonl, parquet or text. compression: gzip, zstd or None. size: bytes on
    disk. version: the time of its last change in ns, or a text that changes when an object is written again.
    """

    path: str
    format: str
    compression: str | None
    size: int
    version: int | str


def find_inputs(patterns: Sequence[str], written: Collection[Path] = ()) -> list[Path]:
    """Return the files that match names, globs and folders, sorted for each pattern; DataError if a pattern has none.

    A folder matches all files in it and in its subfolders, including links to folders and excluding names that begin
    with a dot. Globs and folders do not match token files, nor `written`, the files and folders written by the run.
    """
    if not patterns:
        raise DataError("--input names no file; give files, folders, or globs in quotes")
    own_files = {os.path.abspath(path) for path in written}
    return [path for pattern in patterns for path in _files(pattern, own_files)]


def describe_input(path: Path) -> InputFile:
    """Return the file's kind, from its suffixes, and its size; DataError for a pipe or a device."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(path.name).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    content_kind = KINDS.get(suffixes[-1], "text") if suffixes else "text"
    remote: Any = in_storage(path)
    try:
        status = path.stat()
        if remote is not None:
            return InputFile(str(path), content_kind, compression, status.st_size, remote.version())
    except OSError as error:
        raise UnreachableFileError(f"--input {path} cannot be read ({error.strerror}); repair or remove it") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"--input {path} is a pipe or a device, which cannot be read in parts or a second time; write "
            "its content to a file (.gz and .zst are read as they are)"
        )
    return InputFile(str(path), content_kind, compression, status.st_size, status.st_mtime_ns)


def _files(pattern: str, own_files: Collection[str]) -> list[Path]:
    local = path_of(pattern)
    if local is None:
        files = _objects(pattern)
    elif local.is_file():
        return [local]
    else:
        names = [str(local)] if local.is_dir() else sorted(glob.glob(str(local), recursive=True))
        files = [path for name in names for path in (_inside(name) if Path(name).is_dir() else [Path(name)])]
        files = [path for path in files if not _is_own(path, own_files)]
    files = [path for path in files if not path.name.endswith(TOKEN_FILES)]
    if not files:
        raise DataError(f"--input {pattern}: no file has that name; give files, folders, or globs in quotes")
    return files


def _objects(pattern: str) -> list[Path]:
    try:
        remote: Any = location(pattern)
        if remote.is_file():
            return [remote]
        bucket, _, key = pattern.partition("://")[2].partition("/")
        is_pattern = glob.has_magic(key) and not remote.is_dir()
        root: Any = location(f"{remote.scheme}://{bucket}")
        paths = root.objects(key) if is_pattern else remote.objects()
    except ConfigError as error:
        raise ConfigError(f"--input {pattern}: {error}") from None
    except OSError as error:
        raise DataError(f"--input {pattern} cannot be listed: {error.strerror}") from error
    return [path for path in paths if str(path).count("/.") == pattern.count("/.")]


def _inside(folder: str) -> list[Path]:
    paths = []
    seen = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        # A link to a parent folder would cause an endless recursion.
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
    return paths


def _is_own(path: Path, own_files: Collection[str]) -> bool:
    full = Path(os.path.abspath(path))
    return bool(own_files) and any(str(path_) in own_files for path_ in (full, *full.parents))


class ObjectFile(io.RawIOBase):
    """An object as a file. UnreachableFileError: the storage fails, or the object has become shorter.

    until: a request does not cross this position; those after it are short.
    """

    def __init__(self, source: InputFile, until: int | None = None) -> None:
        self._remote: Any = location(source.path)
        self._size = source.size
        self._until = source.size if until is None else until
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    seekable = readable

    def seek(self, offset: int, origin: int = os.SEEK_SET) -> int:
        """Move, and return the new position."""
        starts = (0, self._position, self._size)
        self._position = starts[origin] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, at most up to the end of a request; return the number of bytes, 0 at the end."""
        position = self._position
        ahead = self._until - position if position < self._until else BUFFER_BYTES
        size = max(0, min(len(buffer), ahead, self._size - position))
        try:
            data = self._remote.read_range(position, size)
            if len(data) < size:
                raise OSError(errno.EIO, f"it ends after {len(data):,} of {size:,} bytes", str(self._remote))
        except OSError as error:
            raise UnreachableFileError(
                f"--input {self._remote} cannot be read from byte {position:,} on: {error.strerror}; repeat the same "
                "command, which continues"
            ) from error
        buffer[:size] = data
        self._position += size
        return size


class Stream(AbstractContextManager["Stream"]):
    """The decompressed bytes of an input file, in order; DamagedFileError, with the position, if it is damaged.

    until: end of the range that is read, for requests to object storage. position: index of the next byte. raw: number
    of bytes read from disk.
    """

    def __init__(self, source: InputFile, until: int | None = None) -> None:
        self._source = source
        self.position = 0
        local = path_of(source.path)
        with self._naming_damage():
            raw = ObjectFile(source, until) if local is None else io.FileIO(local)
        self._raw = io.BufferedReader(raw, REQUEST_BYTES if local is None else BUFFER_BYTES)
        self._file = _decompressed(self._raw, source.compression)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._raw.close()

    @property
    def raw(self) -> int:
        """Number of bytes read from disk."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """Read the next `size` bytes, fewer only at the end."""
        with self._naming_damage():
            data = self._file.read(size)
        self._advance(len(data))
        if len(data) < size:
            self._check_unchanged()
        return data

    def readline(self, limit: int) -> bytes:
        """Read the rest of the line including the newline, or its first `limit` bytes."""
        with self._naming_damage():
            data = self._file.readline(limit)
        self._advance(len(data))
        return data

    def skip_to(self, position: int) -> None:
        """Advance to a position, or to the end of a shorter file."""
        if self._source.compression is None:
            self._file.seek(position)
            self.position = position
        while self.position < position and self.read(min(BUFFER_BYTES, position - self.position)):
            pass

    def _advance(self, size: int) -> None:
        self.position += size
        if self._source.compression and self.position > max(EXPANDED_BYTES, EXPANSION * self.raw):
            raise DamagedFileError(
                f"{self._source.path} expands to more than {EXPANSION} times its size, as a decompression bomb does; "
                "remove it, or decompress it yourself if its content is right"
            )

    def _check_unchanged(self) -> None:
        """Check at the end of the content that the file has not changed since the start of the run."""
        now = describe_input(location(self._source.path))
        if now != self._source:
            raise DamagedFileError(
                f"{self._source.path} changed while it was read, from {self._source.size:,} to "
                f"{now.size:,} bytes; wait until it is complete, then prepare the data again"
            )

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        path = self._source.path
        codec = self._source.compression
        try:
            yield
        except EOFError as error:
            raise DamagedFileError(
                f"{path} is truncated: its {codec} data ends early, after {self.position:,} bytes of content; copy or "
                "create it again"
            ) from error
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise DamagedFileError(
                f"{path} is damaged after {self.position:,} bytes of content, or not a {codec} file ({error}); create "
                "it again"
            ) from error
        except OSError as error:
            raise DamagedFileError(
                f"{path} cannot be read after byte {self.position:,} of its content ({error.strerror}); copy it again"
            ) from error


class ZstdFile(io.RawIOBase):
    """The content of all frames of a zstd file; EOFError if the last one is incomplete."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        # Window size of `zstd --ultra --long=31`.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._fresh = True
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with at most its length of decompressed bytes; return their number, 0 at the end."""
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
                self._fresh = True
            data = data or self._raw.read(COMPRESSED_BYTES)
            if not data:
                if not self._fresh:
                    raise EOFError
                return 0
            self._fresh = False
            self._ready = memoryview(self._frame.decompress(data))
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken


def _decompressed(raw: BinaryIO, compression: str | None) -> BinaryIO:
    if compression == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if compression == "zstd":
        return io.BufferedReader(ZstdFile(raw), BUFFER_BYTES)
    return raw


def expanded(source: InputFile, folder: Path) -> Path | ObjectFile:
    """Return the file, or its decompressed copy in the folder, because Parquet is read from its end."""
    if source.compression is None:
        return path_of(source.path) or ObjectFile(source)
    # The name includes size and date, because a killed run may have left the copy of an older file.
    identity = f"{source.path} {source.size} {source.version}"
    path = folder / f"{hashlib.sha256(identity.encode('utf-8', 'surrogateescape')).hexdigest()}.parquet"
    if not path.exists():
        partial = path.with_suffix(".partial")
        with Stream(source) as stream, partial.open("wb") as file:
            while data := stream.read(BUFFER_BYTES):
                with naming_full_disk(file):
                    file.write(data)
            sync_file(file)
        os.replace(partial, path)
    return path
