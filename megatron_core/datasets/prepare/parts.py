"""The parts that the input is cut into, and what a worker makes of each: a part on the shelf, or a part file.

It holds blocks, one for each batch: a line of JSON, then for each key its tokens, its sequence lengths (int32)
and its documents' numbers of sequences (int32). A last line says that it is whole.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from mmap import mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_core.datasets.aside import aside, close_quietly, naming_the_place
from megatron_core.datasets.prepare.documents import Piece
from megatron_core.datasets.prepare.encode import Encoded
from megatron_core.datasets.prepare.inputs import Source
from megatron_core.datasets.prepare.shelf import Shelf

WHOLE = b'{"whole": true}\n'
MOST_FILES = 1000


@dataclass(frozen=True)
class Group:
    """What is cut into parts together: some small files, which are one part, or one large one.

    parts: how many; None where only reading to the end tells. step: how far the ranges of two parts are apart.
    """

    first: int
    last: int
    parts: int | None
    step: int | None

    def pieces(self, index: int) -> list[Piece]:
        """The ranges of files that make up a part."""
        if self.step is None:
            return [Piece(source, 0, None) for source in range(self.first, self.last)]
        return [Piece(self.first, index * self.step, (index + 1) * self.step)]


def make_groups(sources: Sequence[Source], separator: str | None, part_bytes: int) -> list[Group]:
    """The groups of all files, in order."""
    groups: list[Group] = []
    begin, held = 0, 0
    for number, source in enumerate(sources):
        whole = source.compression is None and source.kind != "parquet"
        whole = whole and (source.size <= part_bytes or (source.kind == "text" and separator is None))
        if not whole or held + source.size > part_bytes or number - begin >= MOST_FILES:
            groups += [Group(begin, number, 1, None)] if number > begin else []
            begin, held = number, 0
        if whole:
            held += source.size
            continue
        groups.append(_large(number, source, separator, part_bytes))
        begin = number + 1
    return groups + ([Group(begin, len(sources), 1, None)] if len(sources) > begin else [])


def _large(number: int, source: Source, separator: str | None, part_bytes: int) -> Group:
    if source.kind == "parquet":
        return Group(number, number + 1, None, 1)
    if source.kind == "text" and separator is None:
        return Group(number, number + 1, 1, None)
    known = source.compression is None and source.kind == "jsonl"
    return Group(number, number + 1, -(-source.size // part_bytes) if known else None, part_bytes)


@dataclass(frozen=True)
class BlockHead:
    """What a block says of itself.

    source: number of the file. lines: passed in it. at: bytes of the file on the disk done when this is done.
    size: bytes of text. tokens, sequences, documents: of each key. remarks: place, kind and sentence.
    """

    source: int
    lines: int
    at: int
    size: int
    tokens: list[int]
    sequences: list[int]
    documents: int
    remarks: list[tuple[int, str, str]]


def part_path(folder: Path, group: int, index: int, last: bool) -> Path:
    """The name of a part file, which says whether it is its group's last."""
    return folder / f"{group:06d}-{index:08d}.{'last' if last else 'part'}"


def parts_in(folder: Path) -> Iterator[tuple[int, int, bool]]:
    """Group, index and lastness of the whole part files in the folder; other part files are removed."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".part", ".last") and _is_whole(path):
            group, index = path.stem.split("-")
            yield int(group), int(index), path.suffix == ".last"
        elif path.suffix in (".part", ".last", ".partial"):
            path.unlink()


def remove_parts(folder: Path) -> None:
    """Remove all part files in the folder, whole or not."""
    for path in folder.iterdir():
        if path.suffix in (".part", ".last", ".partial"):
            path.unlink()


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(WHOLE)))
        return file.read() == WHOLE


class PartWriter:
    """Writes a part to the slot of the shelf if there is one, and to a file where it needs more room than that."""

    def __init__(self, folder: Path, group: int, index: int, shelf: Shelf, slot: int | None) -> None:
        self._folder, self._group, self._index = folder, group, index
        self._path = aside(folder / f"{group:06d}-{index:08d}")
        self._memory = None if slot is None else shelf.at(slot)
        self._held = 0
        self._most = shelf.size
        self._file = self._path.open("wb") if slot is None else None

    def add(self, head: BlockHead, encoded: Sequence[Encoded]) -> None:
        """Append a block."""
        line = json.dumps(asdict(head)).encode("ascii") + b"\n"
        self._write([line, *(array for part in encoded for array in (part.tokens, part.lengths, part.counts))])

    def finish(self, last: bool) -> bool:
        """Say that the part is whole, and give its file a name; whether it is on the shelf and there is no file."""
        self._write([WHOLE])
        if self._file is None:
            return True
        with naming_the_place(self._file):
            self._file.flush()
        self._file.close()
        os.replace(self._path, part_path(self._folder, self._group, self._index, last))
        return False

    def close(self) -> None:
        """Close the file, whole or not."""
        if self._file is not None:
            close_quietly(self._file)

    def _write(self, pieces: Sequence[bytes | np.ndarray]) -> None:
        if self._file is None:
            size = sum(memoryview(piece).nbytes for piece in pieces)
            if self._held + size <= self._most:
                for piece in pieces:
                    self._memory.write(piece)
                self._held += size
                return
            self._file = self._path.open("wb")
            pieces = [self._written(), *pieces]
        with naming_the_place(self._file):
            for piece in pieces:
                self._file.write(piece)

    def _written(self) -> bytes:
        """What is in the slot."""
        self._memory.seek(-self._held, os.SEEK_CUR)
        return self._memory.read(self._held)


def read_part(file: BinaryIO | mmap, dtype: str) -> Iterator[tuple[BlockHead, list[Encoded]]]:
    """The blocks of a part that begins where the file stands."""
    while (line := file.readline()) != WHOLE:
        head = BlockHead(**json.loads(line))
        keys = []
        for tokens, sequences in zip(head.tokens, head.sequences, strict=True):
            arrays = ((dtype, tokens), ("int32", sequences), ("int32", head.documents))
            keys.append(Encoded(*(np.frombuffer(file.read(n * np.dtype(d).itemsize), dtype=d) for d, n in arrays)))
        yield head, keys
