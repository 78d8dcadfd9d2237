"""A `.bin`/`.idx` pair that grows on the disk, tokens and index alike, with nothing of it in memory.

Beside `X.bin.partial` lie `X.bin.lengths.partial` (int32 a sequence), `X.bin.documents.partial` (int64 a document:
the sequences up to its end) and, in multimodal files, `X.bin.modes.partial` (int8 a sequence). `finalize` streams
them into the index.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_core.datasets.aside import (
    aside,
    close_quietly,
    naming_the_place,
    put_on_disk,
    putting_on_disk,
    start_writing,
)
from megatron_core.datasets.header import remove_header
from megatron_core.datasets.index_format import HEADER, MAGIC, VERSION, DType
from megatron_core.errors import DataError

# Large enough that a block's system calls cost nothing beside its copying; memory is a few of them.
BLOCK_BYTES = 1 << 20
# Of tokens that the system may hold back before it is told to write them.
HELD_BYTES = 4 << 20


@dataclass(frozen=True)
class Extent:
    """How much a growing pair holds."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class TokenWriter:
    """Appends tokens, sequence lengths and document ends to files that get their names in `finalize`.

    resume: what an earlier process is known to have written; whatever lies behind it is cut off.
    """

    def __init__(
        self, bin_path: str | Path, dtype: Any, multimodal: bool = False, resume: Extent | None = None
    ) -> None:
        self.bin_path = Path(bin_path)
        self.dtype = np.dtype(dtype)
        self.extent = resume or Extent()
        self._held = 0
        self.bin_path.parent.mkdir(parents=True, exist_ok=True)
        mode = "wb" if resume is None else "r+b"
        self._tokens = aside(self.bin_path).open(mode)
        self._lengths = self._spill("lengths").open(mode)
        self._documents = self._spill("documents").open(mode)
        self._modes = self._spill("modes").open(mode) if multimodal else None
        if resume is not None:
            self._cut(resume)

    def append(self, tokens: Any, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Append whole documents: token bytes, each sequence's length [S], each document's number of sequences [D]."""
        self.append_sequences(tokens, lengths)
        ends = np.cumsum(counts, dtype=np.int64) + (self.extent.sequences - len(lengths))
        self.end_documents(ends)

    def append_sequences(self, tokens: Any, lengths: np.ndarray, modes: np.ndarray | None = None) -> None:
        """Append sequences: their tokens as bytes of the file's dtype, and their lengths [S]."""
        self.append_tokens(tokens)
        self.note_sequences(lengths, modes)

    def append_tokens(self, tokens: Any) -> None:
        """Append the bytes of some tokens, whose sequences are still to be noted."""
        size = memoryview(tokens).nbytes
        self._held += size
        with naming_the_place(self._tokens):
            self._tokens.write(tokens)
            if self._held >= HELD_BYTES:
                self._tokens.flush()
                start_writing(self._tokens)
                self._held = 0
        self._grow(tokens=size // self.dtype.itemsize)

    def note_sequences(self, lengths: np.ndarray, modes: np.ndarray | None = None) -> None:
        """Note the lengths [S] of sequences whose tokens were appended."""
        with naming_the_place(self._lengths):
            self._lengths.write(lengths.astype("<i4").tobytes())
        if self._modes is not None:
            given = np.zeros(len(lengths), np.int8) if modes is None else modes
            with naming_the_place(self._modes):
                self._modes.write(given.astype("i1").tobytes())
        self._grow(sequences=len(lengths))

    def end_documents(self, ends: np.ndarray) -> None:
        """Close documents: for each, how many sequences of the whole file there are up to its end [D]."""
        with naming_the_place(self._documents):
            self._documents.write(ends.astype("<i8").tobytes())
        self._grow(documents=len(ends))

    def sync(self) -> Extent:
        """Put all of it on the disk; from the extent that is returned a later process can go on."""
        for file in self._files():
            put_on_disk(file)
        return self.extent

    def write_index(self, idx_path: str | Path) -> None:
        """Write the index aside and put both files on the disk: what is left is `publish_pair`."""
        with putting_on_disk(self._tokens), aside(idx_path).open("wb") as file:
            with naming_the_place(file):
                self._stream_index(file)
            put_on_disk(file)

    def finalize(self, idx_path: str | Path) -> None:
        """Write the index and give both files their names."""
        self.write_index(idx_path)
        self.close()
        publish_pair(self.bin_path, idx_path)

    def close(self) -> None:
        """Close the files and leave them as they are."""
        for file in self._files():
            close_quietly(file)

    def discard(self) -> None:
        """Remove what was written, unless it was finalized."""
        self.close()
        for path in unfinished(self.bin_path):
            path.unlink(missing_ok=True)

    @property
    def closed(self) -> bool:
        """Whether nothing more can be appended."""
        return self._tokens.closed

    def _files(self) -> list[BinaryIO]:
        return [file for file in (self._tokens, self._lengths, self._documents, self._modes) if file is not None]

    def _spill(self, name: str) -> Path:
        return aside(f"{self.bin_path}.{name}")

    def _grow(self, tokens: int = 0, sequences: int = 0, documents: int = 0) -> None:
        now = self.extent
        self.extent = Extent(now.tokens + tokens, now.sequences + sequences, now.documents + documents)

    def _cut(self, extent: Extent) -> None:
        sizes = (extent.tokens * self.dtype.itemsize, 4 * extent.sequences, 8 * extent.documents, extent.sequences)
        for file, size in zip(self._files(), sizes, strict=False):
            if os.fstat(file.fileno()).st_size < size:
                raise DataError(
                    f"{file.name} is shorter than the {size:,} bytes that an interrupted run had written; remove that "
                    "run's .work folder to start over"
                )
            file.truncate(size)
            file.seek(size)

    def _stream_index(self, file: BinaryIO) -> None:
        code = DType.code_from_dtype(self.dtype)
        for spill in self._files():
            spill.flush()
        file.write(HEADER.pack(MAGIC, VERSION, code, self.extent.sequences, self.extent.documents + 1))
        for block in _blocks(self._spill("lengths"), "<i4"):
            file.write(block.tobytes())
        start = 0
        for block in _blocks(self._spill("lengths"), "<i4"):
            # int64 throughout: a .bin file outgrows 2**31 bytes soon.
            ends = np.cumsum(block, dtype=np.int64) * self.dtype.itemsize + start
            file.write(np.concatenate([[start], ends[:-1]]).astype("<i8").tobytes())
            start = int(ends[-1])
        file.write(bytes(8))
        for block in _blocks(self._spill("documents"), "<i8"):
            file.write(block.tobytes())
        if self._modes is not None:
            for block in _blocks(self._spill("modes"), "i1"):
                file.write(block.tobytes())


def publish_pair(bin_path: str | Path, idx_path: str | Path) -> None:
    """Give a written pair its names; called again after an interruption, it does what is left of it."""
    # An old index must not be found beside the new tokens, should the machine stop between the two renames;
    # nor an old header, which would vouch for another tokenizer.
    if aside(bin_path).exists():
        Path(idx_path).unlink(missing_ok=True)
        remove_header(str(idx_path).removesuffix(".idx"))
        os.replace(aside(bin_path), bin_path)
    if aside(idx_path).exists():
        os.replace(aside(idx_path), idx_path)
    for path in unfinished(bin_path):
        path.unlink(missing_ok=True)


def unfinished(bin_path: str | Path) -> list[Path]:
    """The files that a pair lies in until it is whole, its index aside excepted."""
    return [aside(bin_path), *(aside(f"{bin_path}.{name}") for name in ("lengths", "documents", "modes"))]


def _blocks(path: Path, kind: str) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            yield np.frombuffer(data, dtype=kind)
