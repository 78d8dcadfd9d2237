"""Writes a `.bin`/`.idx` pair, by sequences or by blocks of tokens.

Temporary files next to `X.bin.partial`: `X.bin.lengths.partial` (int32 per sequence), `X.bin.documents.partial` (int64
per document: number of sequences up to its end) and, in multimodal files, `X.bin.modes.partial` (int8 per sequence).
`finalize` copies them into the index.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from megatron_core.data_parts.manifest import get_parts_path
from megatron_core.datasets.header import FORMAT, DatasetHeader, check_header_path, get_header_path, remove_header
from megatron_core.datasets.indexed import HEADER, MAGIC, VERSION, DType, IndexedDataset, get_bin_path, get_idx_path
from megatron_core.errors import ConfigError, DataError
from megatron_core.output_file import make_folder, refuse_other_file, starting_with
from megatron_core.preprocess.atomic_write import (
    atomic_write,
    close_quietly,
    naming_full_disk,
    open_partial,
    partial_path,
    start_writeback,
    sync_file,
    syncing_file,
)

# Large enough that system calls are negligible next to copying; a few blocks are in memory.
BLOCK_BYTES = 1 << 20
# Bytes of tokens in the page cache before their writing is started.
HELD_BYTES = 4 << 20


@dataclass(frozen=True)
class Extent:
    """The size of a pair that is being written."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class TokenWriter:
    """Appends tokens, sequence lengths and document ends; `finalize` gives the files their final names.

    resume: the extent known to be written by an earlier process; the files are truncated to it.
    """

    def __init__(
        self, bin_path: str | Path, dtype: Any, multimodal: bool = False, resume: Extent | None = None
    ) -> None:
        self.bin_path = Path(bin_path)
        self.dtype = np.dtype(dtype)
        self.extent = resume or Extent()
        self._held = 0
        make_folder(self.bin_path.parent)
        mode: Literal["wb", "r+b"] = "wb" if resume is None else "r+b"
        self._tokens = open_partial(partial_path(self.bin_path), mode)
        self._lengths = open_partial(self._spill("lengths"), mode)
        self._documents = open_partial(self._spill("documents"), mode)
        self._modes = open_partial(self._spill("modes"), mode) if multimodal else None
        if resume is not None:
            self._cut(resume)

    def append(self, tokens: Any, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Append complete documents: token bytes, the length of each sequence [S], the number of sequences per document
        [D]."""
        self.append_sequences(tokens, lengths)
        ends = np.cumsum(counts, dtype=np.int64) + (self.extent.sequences - len(lengths))
        self.end_documents(ends)

    def append_sequences(self, tokens: Any, lengths: np.ndarray, modes: np.ndarray | None = None) -> None:
        """Append sequences: token bytes in the file's dtype, and the length of each sequence [S]."""
        self.append_tokens(tokens)
        self.note_sequences(lengths, modes)

    def append_tokens(self, tokens: Any) -> None:
        """Append token bytes; their sequences are recorded later."""
        size = memoryview(tokens).nbytes
        self._held += size
        with naming_full_disk(self._tokens):
            self._tokens.write(tokens)
            if self._held >= HELD_BYTES:
                self._tokens.flush()
                start_writeback(self._tokens)
                self._held = 0
        self._grow(tokens=size // self.dtype.itemsize)

    def note_sequences(self, lengths: np.ndarray, modes: np.ndarray | None = None) -> None:
        """Record the lengths [S] of sequences whose tokens have been appended."""
        with naming_full_disk(self._lengths):
            self._lengths.write(lengths.astype("<i4").tobytes())
        if self._modes is not None:
            modes_or_zeros = np.zeros(len(lengths), np.int8) if modes is None else modes
            with naming_full_disk(self._modes):
                self._modes.write(modes_or_zeros.astype("i1").tobytes())
        self._grow(sequences=len(lengths))

    def end_documents(self, ends: np.ndarray) -> None:
        """Close documents; each end is the number of sequences in the file up to it [D]."""
        with naming_full_disk(self._documents):
            self._documents.write(ends.astype("<i8").tobytes())
        self._grow(documents=len(ends))

    def noted(self, name: str, dtype: str) -> list[int]:
        """The numbers in one of the temporary files."""
        for file in self._files():
            file.flush()
        return [number for block in _blocks(self._spill(name), dtype) for number in block.tolist()]

    def sync(self) -> Extent:
        """Flush all files to disk; a later process can resume from the returned extent."""
        for file in self._files():
            sync_file(file)
        return self.extent

    def cut(self, extent: Extent) -> None:
        """Truncate the files to an earlier extent."""
        for file in self._files():
            file.flush()
        self._cut(extent)
        self.extent = extent

    def write_index(self, idx_path: str | Path) -> None:
        """Write the index under its temporary name and flush both files to disk, ready for `publish_pair`."""
        with syncing_file(self._tokens), open_partial(partial_path(idx_path)) as file:
            with naming_full_disk(file):
                self._stream_index(file)
            sync_file(file)

    def finalize(self, idx_path: str | Path) -> None:
        """Write the index and give both files their final names."""
        self.write_index(idx_path)
        self.close()
        publish_pair(self.bin_path, idx_path)

    def close(self) -> None:
        """Close the files without changing them."""
        for file in self._files():
            close_quietly(file)

    def discard(self) -> None:
        """Delete the files unless they were finalized."""
        self.close()
        for path in unfinished(self.bin_path):
            path.unlink(missing_ok=True)

    @property
    def closed(self) -> bool:
        """Whether the files are closed."""
        return self._tokens.closed

    def _files(self) -> list[BinaryIO]:
        return [file for file in (self._tokens, self._lengths, self._documents, self._modes) if file is not None]

    def _spill(self, name: str) -> Path:
        return partial_path(f"{self.bin_path}.{name}")

    def _grow(self, tokens: int = 0, sequences: int = 0, documents: int = 0) -> None:
        now = self.extent
        self.extent = Extent(now.tokens + tokens, now.sequences + sequences, now.documents + documents)

    def _cut(self, extent: Extent) -> None:
        sizes = (extent.tokens * self.dtype.itemsize, 4 * extent.sequences, 8 * extent.documents, extent.sequences)
        for file, size in zip(self._files(), sizes, strict=False):
            if os.fstat(file.fileno()).st_size < size:
                raise DataError(
                    f"{file.name} is shorter than the {size:,} bytes that an interrupted run wrote; remove that "
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
            # int64 throughout: a .bin file easily exceeds 2**31 bytes.
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
    """Give a written pair its final names; after an interruption, calling it again completes the rest."""
    # If the machine stops between the two renames, the new tokens must not have an old index, nor an old header, which
    # might name another tokenizer.
    if partial_path(bin_path).exists():
        Path(idx_path).unlink(missing_ok=True)
        remove_header(str(idx_path).removesuffix(".idx"))
        os.replace(partial_path(bin_path), bin_path)
    if partial_path(idx_path).exists():
        os.replace(partial_path(idx_path), idx_path)
    for path in unfinished(bin_path):
        path.unlink(missing_ok=True)


def write_header(path_prefix: str, header: DatasetHeader) -> None:
    """Write the header; DataError if another program's JSON file has its name."""
    check_header_path(path_prefix)
    with atomic_write(get_header_path(path_prefix)) as file:
        file.write(json.dumps({"format": FORMAT, **asdict(header)}, indent=2).encode("utf-8") + b"\n")


def refuse_existing(prefixes: Iterable[str]) -> None:
    """ConfigError if token files of these names exist, which a run would replace."""
    for path in (name(prefix) for prefix in prefixes for name in (get_bin_path, get_idx_path, get_parts_path)):
        if Path(path).exists():
            raise ConfigError(f"{path} already exists; choose another --output-prefix, or replace it with --overwrite")


def refuse_other_files(prefixes: Iterable[str]) -> None:
    """ConfigError if files of these names exist and are not token files."""
    for prefix in prefixes:
        bin_path = Path(get_bin_path(prefix))
        idx_path = Path(get_idx_path(prefix))
        refuse_other_file(f"--output-prefix {prefix}", idx_path, starting_with("index of a token file", MAGIC))
        if bin_path.exists() and not idx_path.exists() and not partial_path(idx_path).exists():
            raise ConfigError(
                f"--output-prefix {prefix}: {bin_path} exists without {idx_path.name}, so it may not be a token file; "
                "choose another prefix, or remove it"
            )


def unfinished(bin_path: str | Path) -> list[Path]:
    """The files of an unfinished pair, except its index."""
    return [partial_path(bin_path), *(partial_path(f"{bin_path}.{name}") for name in ("lengths", "documents", "modes"))]


def _blocks(path: Path, dtype: str) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            yield np.frombuffer(data, dtype=dtype)


class IndexedDatasetBuilder:
    """Writes sequences and documents; nothing appears under its final name before `finalize`.

    Lengths and documents are kept in temporary files, so that memory does not grow with the data. As a context manager
    it deletes its files if the block ends without `finalize`.
    """

    def __init__(self, bin_path: str, dtype: npt.DTypeLike = np.int32, multimodal: bool = False) -> None:
        self._writer = TokenWriter(bin_path, dtype, multimodal)
        self._multimodal = multimodal

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._writer.closed or error_type is not None:
            self._writer.discard()

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence [tokens]: any array-like of numbers that fit the dtype."""
        tokens = self._checked(tensor)
        self._append(tokens, [len(tokens)], [mode])

    def end_document(self) -> None:
        """Close the document of the sequences appended since the last call."""
        self._writer.end_documents(np.array([self._writer.extent.sequences]))

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a document; `tensor` concatenates its sequences of the given lengths."""
        tokens = self._checked(tensor)
        if sum(lengths) != len(tokens):
            raise DataError(f"a document of {len(tokens)} tokens cannot have sequences of {list(lengths)} tokens")
        modes_or_zeros = [0] * len(lengths) if modes is None else modes
        if len(modes_or_zeros) != len(lengths):
            raise DataError(f"a document of {len(lengths)} sequences cannot have {len(modes_or_zeros)} modes")
        self._append(tokens, lengths, modes_or_zeros)
        self.end_document()

    def add_index(self, path_prefix: str) -> None:
        """Append all sequences and documents of another pair of files; DataError if its dtype differs."""
        other = IndexedDataset(path_prefix, multimodal=self._multimodal)
        if np.dtype(other.dtype) != self._writer.dtype:
            raise DataError(
                f"{path_prefix} holds {np.dtype(other.dtype).name} and cannot be appended to "
                f"{self._writer.dtype.name}; prepare both with one tokenizer, or build with the other dtype"
            )
        before = self._writer.extent.sequences
        with open(get_bin_path(path_prefix), "rb") as source:
            while block := source.read(BLOCK_BYTES):
                self._writer.append_tokens(block)
        for start in range(0, len(other), BLOCK_BYTES):
            span = slice(start, start + BLOCK_BYTES)
            modes = None if other.sequence_modes is None else other.sequence_modes[span]
            self._writer.note_sequences(other.sequence_lengths[span], modes)
        for start in range(1, len(other.document_indices), BLOCK_BYTES):
            self._writer.end_documents(other.document_indices[start : start + BLOCK_BYTES] + before)

    def finalize(self, idx_path: str) -> None:
        """Write the index and give both files their final names."""
        self._writer.finalize(idx_path)

    @property
    def sequence_lengths(self) -> list[int]:
        """The lengths of all appended sequences, read from their file."""
        return self._writer.noted("lengths", "<i4")

    @property
    def sequence_modes(self) -> list[int] | None:
        """The modes of all appended sequences; None unless multimodal."""
        return self._writer.noted("modes", "i1") if self._multimodal else None

    @property
    def num_tokens(self) -> int:
        """Number of appended tokens."""
        return self._writer.extent.tokens

    @property
    def num_documents(self) -> int:
        """Number of closed documents."""
        return self._writer.extent.documents

    def _append(self, tokens: np.ndarray, lengths: Sequence[int], modes: Sequence[int]) -> None:
        longest = max(lengths, default=0)
        if longest >= 2**31:
            raise DataError(f"a sequence of {longest} tokens: the format counts to {2**31 - 1}; split the document")
        self._writer.append_sequences(tokens, np.array(lengths, np.int64), np.array(modes, np.int64))

    def _checked(self, tensor: Any) -> np.ndarray:
        """The tokens in the file's dtype. A plain cast would silently wrap numbers that do not fit."""
        values = np.asarray(tensor).reshape(-1)
        dtype = self._writer.dtype
        if values.dtype.kind in "US":  # strings of digits, which numpy converts only to integers
            values = values.astype(np.int64 if dtype.kind in "iu" else dtype)
        if dtype.kind in "iu" and len(values):
            limits = np.iinfo(dtype)
            low, high = values.min(), values.max()
            if low < limits.min or high > limits.max:
                wrong = int(low if low < limits.min else high)
                raise DataError(
                    f"token id {wrong} does not fit {dtype.name}, which {self._writer.bin_path} is written "
                    "in; build with dtype=DType.optimal_dtype(vocab_size)"
                )
        return np.ascontiguousarray(values.astype(dtype.newbyteorder("<")))
