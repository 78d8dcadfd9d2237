"""Which files a run reads, and what is in each of them."""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_core.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Source:
    """One input file.

    kind: jsonl, parquet or text. compression: gzip, zstd or None. size: bytes on the disk.
    """

    path: str
    kind: str
    compression: str | None
    size: int
    mtime_ns: int


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that names, globs and folders stand for, each pattern's in sorted order; DataError if one has none.

    A folder stands for all files in it and in its folders, those whose name begins with a dot left out.
    """
    if not patterns:
        raise DataError("--input names no file; give files, folders, or globs in quotes")
    return [path for pattern in patterns for path in _files(pattern)]


def describe(path: Path) -> Source:
    """The file's kind, by its suffixes, and its size."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    kind = KINDS.get(suffixes[-1], "text") if suffixes else "text"
    status = path.stat()
    return Source(str(path), kind, compression, status.st_size, status.st_mtime_ns)


def _files(pattern: str) -> list[Path]:
    if Path(pattern).is_file():
        return [Path(pattern)]
    names = [pattern] if Path(pattern).is_dir() else sorted(glob.glob(pattern, recursive=True))
    files = [path for name in names for path in (_inside(name) if Path(name).is_dir() else [Path(name)])]
    if not files:
        raise DataError(f"--input {pattern}: no file has that name; give files, folders, or globs in quotes")
    return files


def _inside(folder: str) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
    return found
