"""Reading JSON Lines text: one JSON object a line, its texts under keys."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_core.errors import DataError


@dataclass(frozen=True)
class Chunk:
    """Successive lines of one file: where they stand, and their bytes."""

    path: str
    first_line: int
    lines: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes in the lines."""
        return sum(len(line) for line in self.lines)


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files that names and globs stand for, each pattern's in sorted order; DataError if one has none."""
    if not patterns:
        raise DataError("--input names no file; give JSON Lines files, or globs in quotes")
    found: list[Path] = []
    for pattern in patterns:
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            raise DataError(f"--input {pattern}: no file has that name; give JSON Lines files, or globs in quotes")
        found += files
    return found


def read_chunks(paths: Sequence[Path], chunk_bytes: int) -> Iterator[Chunk]:
    """The lines of the files in order, in pieces of about `chunk_bytes`."""
    for path in paths:
        with path.open("rb") as file:
            first_line = 1
            # A line longer than the limit still comes whole, alone.
            while lines := file.readlines(chunk_bytes):
                yield Chunk(str(path), first_line, tuple(lines))
                first_line += len(lines)


def texts_of(chunk: Chunk, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """The texts under the keys, for each line that is not blank; DataError names file and line of a fault."""
    return [
        _texts(f"{chunk.path}, line {number}", line, keys)
        for number, line in enumerate(chunk.lines, start=chunk.first_line)
        if line.strip()
    ]


def _texts(place: str, line: bytes, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is no JSON ({error}); mend or remove the line") from error
    if not isinstance(document, dict):
        raise DataError(f'{place} holds a {type(document).__name__}, expected an object such as {{"text": ...}}')
    return tuple(_text(place, document, key) for key in keys)


def _text(place: str, document: dict, key: str) -> str:
    if key not in document:
        there = ", ".join(sorted(document)[:10]) or "none"
        raise DataError(f"{place} has no key {key!r}; its keys: {there}; choose with --json-keys or --json-key")
    text = document[key]
    if not isinstance(text, str):
        raise DataError(f"{place} has a {type(text).__name__} under {key!r}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place} has half of a surrogate pair under {key!r}, which is no text; mend it") from error
    return text
