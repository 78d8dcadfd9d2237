"""Find the input files of a run and read their decompressed bytes."""

import glob
import gzip
import io
import os
import stat
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from megatron_core.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BUFFER_BYTES = 1 << 18
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


@dataclass(frozen=True)
class InputFile:
    """One input file.

    format: jsonl, parquet or text. compression: gzip, zstd or None. size: bytes on disk.
    """

    path: str
    format: str
    compression: str | None
    size: int
    mtime_ns: int


def find_inputs(patterns: Sequence[str], written: Collection[Path] = ()) -> list[Path]:
    """Return the files that match names, globs and folders, sorted for each pattern; DataError if a pattern has none.

    A folder matches all files in it and in its subfolders, including links to folders and excluding names that begin
    with a dot. Globs and folders do not match token files, nor `written`, the files and folders written by the run.
    """
    if not patterns:
        raise DataError("--input names no file; give files, folders, or globs in quotes")
    own_files = {os.path.abspath(path) for path in written}
    return [path for pattern in patterns for path in _files(pattern, own_files)]


def describe(path: Path) -> InputFile:
    """Return the file's kind, from its suffixes, and its size; DataError for a pipe or a device."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    content_kind = KINDS.get(suffixes[-1], "text") if suffixes else "text"
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"--input {path} cannot be read ({error.strerror}); repair or remove it") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"--input {path} is a pipe or a device, which cannot be read in parts or a second time; write "
            "its content to a file (.gz and .zst are read as they are)"
        )
    return InputFile(str(path), content_kind, compression, status.st_size, status.st_mtime_ns)


def _files(pattern: str, own_files: Collection[str]) -> list[Path]:
    if Path(pattern).is_file():
        return [Path(pattern)]
    names = [pattern] if Path(pattern).is_dir() else sorted(glob.glob(pattern, recursive=True))
    files = [path for name in names for path in (_inside(name) if Path(name).is_dir() else [Path(name)])]
    files = [path for path in files if path.suffix not in TOKEN_FILES and not _is_own(path, own_files)]
    if not files:
        raise DataError(f"--input {pattern}: no file has that name; give files, folders, or globs in quotes")
    return files


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


class Stream:
    """The decompressed bytes of an input file, in order; DamagedFileError, with the position, if it is damaged.

    position: index of the next byte. raw: number of bytes read from disk.
    """

    def __init__(self, source: InputFile) -> None:
        self._source = source
        self.position = 0
        with self._naming_damage():
            self._raw = Path(source.path).open("rb", buffering=BUFFER_BYTES)  # noqa: SIM115
        self._file = _decompressed(self._raw, source.compression)

    def __enter__(self) -> "Stream":
        return self

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
        with self._naming_damage():
            status = os.fstat(self._raw.fileno())
        if (status.st_size, status.st_mtime_ns) != (self._source.size, self._source.mtime_ns):
            raise DamagedFileError(
                f"{self._source.path} changed while it was read, from {self._source.size:,} to "
                f"{status.st_size:,} bytes; wait until it is complete, then prepare the data again"
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
