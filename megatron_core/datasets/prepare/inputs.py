"""Which files a run reads, and what is in each of them."""

import glob
import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_core.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# What this tool writes: a folder of text may have been the output's folder too.
TOKEN_FILES = (".bin", ".idx", ".partial")
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


def find_inputs(patterns: Sequence[str], written: Collection[Path] = ()) -> list[Path]:
    """The files that names, globs and folders stand for, each pattern's in sorted order; DataError if one has none.

    A folder stands for all files in it and in its folders, links to folders among them, those whose name begins with
    a dot left out. Globs and folders do not stand for token files, nor for `written`, files and folders that the run
    itself writes.
    """
    if not patterns:
        raise DataError("--input names no file; give files, folders, or globs in quotes")
    own = {os.path.abspath(path) for path in written}
    return [path for pattern in patterns for path in _files(pattern, own)]


def describe(path: Path) -> Source:
    """The file's kind, by its suffixes, and its size; DataError for a pipe or a device."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    kind = KINDS.get(suffixes[-1], "text") if suffixes else "text"
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"--input {path} cannot be read ({error.strerror}); mend or remove it") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"--input {path} is no file but a pipe or a device, which cannot be read in parts or a second time; write "
            "its content to a file (.gz and .zst are read as they are)"
        )
    return Source(str(path), kind, compression, status.st_size, status.st_mtime_ns)


def _files(pattern: str, own: Collection[str]) -> list[Path]:
    if Path(pattern).is_file():
        return [Path(pattern)]
    names = [pattern] if Path(pattern).is_dir() else sorted(glob.glob(pattern, recursive=True))
    files = [path for name in names for path in (_inside(name) if Path(name).is_dir() else [Path(name)])]
    files = [path for path in files if path.suffix not in TOKEN_FILES and not _is_own(path, own)]
    if not files:
        raise DataError(f"--input {pattern}: no file has that name; give files, folders, or globs in quotes")
    return files


def _inside(folder: str) -> list[Path]:
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        # A link to a folder above would go round for ever.
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in sorted(names) if not name.startswith(".")]
    return found


def _is_own(path: Path, own: Collection[str]) -> bool:
    full = Path(os.path.abspath(path))
    return bool(own) and any(str(place) in own for place in (full, *full.parents))
