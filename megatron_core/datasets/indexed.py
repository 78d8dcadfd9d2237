"""Reads a `.bin`/`.idx` pair: any sequence of tokens, by its number."""

# The `.idx` file, byte for byte as Megatron's, little-endian:
#
#     offset        type        content
#     0             9 bytes     magic
#     9             uint64      version
#     17            uint8       code of the tokens' dtype
#     18            uint64      S, number of sequences
#     26            uint64      D, entries of the document index
#     34            int32 * S   tokens in each sequence
#     34 + 4S       int64 * S   offset of each sequence in the .bin file, in bytes
#     34 + 12S      int64 * D   document index: document d is the sequences [index[d], index[d + 1])
#     34 + 12S + 8D int8 * S    mode of each sequence, in multimodal files only (not marked in the file)

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from mmap import ACCESS_READ
from mmap import mmap as mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_core.errors import DataError
from megatron_core.feature import features, load_hook
from megatron_core.locations import in_storage, local_copy, location

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

# Below this vocabulary size Megatron stores 2 bytes per token; 65,536 would be possible, but the files would differ.
SMALL_VOCABULARY = 65500

# Entries of an index checked at a time.
BLOCK = 1 << 20


class DType(IntEnum):
    """Codes of token dtypes (float64 before float32, as in Megatron)."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: npt.DTypeLike) -> int:
        """The code of a numpy dtype; KeyError if the format has none."""
        return cls[np.dtype(value).name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.number]:
        """The numpy scalar type of a code; ValueError for an unknown code."""
        return np.dtype(cls(value).name).type

    @staticmethod
    def size(key: "int | npt.DTypeLike") -> int:
        """Bytes of one token, from a code or from a dtype."""
        if isinstance(key, int):
            key = DType.dtype_from_code(key)
        return np.dtype(key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number]:
        """The dtype for a vocabulary of this size."""
        return np.uint16 if cardinality is not None and cardinality < SMALL_VOCABULARY else np.int32


@dataclass(frozen=True)
class Index:
    """The arrays of an `.idx` file."""

    dtype: type[np.number]
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray
    sequence_modes: np.ndarray | None = None


def get_idx_path(path_prefix: str) -> str:
    """Path of the index file."""
    return f"{path_prefix}.idx"


def get_bin_path(path_prefix: str) -> str:
    """Path of the token file."""
    return f"{path_prefix}.bin"


def index_bytes(sequences: int, document_entries: int, multimodal: bool) -> int:
    """The size of an `.idx` file, in bytes."""
    return HEADER.size + (4 + 8 + (1 if multimodal else 0)) * sequences + 8 * document_entries


def read_index(path: Path, multimodal: bool, mmap: bool) -> Index:
    """The arrays of the index file at `path`, memory-mapped or read; DataError if it is incomplete."""
    size = path.stat().st_size
    if size < HEADER.size:
        raise DataError(f"{path} is truncated: it has {size} bytes, but the header has {HEADER.size}; {_AGAIN}")
    buffer = np.memmap(path, dtype=np.uint8, mode="r") if mmap else np.fromfile(path, dtype=np.uint8)
    dtype, sequences, document_entries = _read_header(path, buffer)
    _check_size(path, size, sequences, document_entries, multimodal)
    index = _arrays(buffer, dtype, sequences, document_entries, multimodal)
    _check_sequences(path, index)
    _check_documents(path, index)
    return index


_AGAIN = "copy it again, or prepare the data again with megatron-preprocess"


def _read_header(path: Path, buffer: np.ndarray) -> tuple[type[np.number], int, int]:
    magic, version, code, sequences, document_entries = HEADER.unpack(buffer[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(
            f"{path} is not an index of a token file: it begins with {magic!r}, expected {MAGIC!r}; "
            "give the prefix of files that megatron-preprocess wrote"
        )
    if version != VERSION:
        raise DataError(f"{path} has version {version} of the format, expected {VERSION}; {_AGAIN}")
    if code not in set(DType):
        known = ", ".join(f"{member.value} {member.name}" for member in DType)
        raise DataError(f"{path} has the unknown dtype code {code}, expected one of {known}; {_AGAIN}")
    return DType.dtype_from_code(code), sequences, document_entries


def _check_size(path: Path, size: int, sequences: int, document_entries: int, multimodal: bool) -> None:
    expected = index_bytes(sequences, document_entries, multimodal)
    counts = f"{sequences} sequences and {document_entries} entries of the document index"
    summary = f"{path} has {size} bytes, expected {expected} for {counts}"
    if multimodal and sequences and size == index_bytes(sequences, document_entries, multimodal=False):
        raise DataError(f"{summary} with modes: it is not multimodal; open it with multimodal=False")
    if size < expected:
        raise DataError(f"{summary}: it is truncated; {_AGAIN}")
    # A multimodal file may be read as plain text: its modes come last and are ignored.
    if size not in (expected, index_bytes(sequences, document_entries, multimodal=True)):
        raise DataError(f"{summary}: it is longer than its header says; {_AGAIN}")


def _arrays(
    buffer: np.ndarray, dtype: type[np.number], sequences: int, document_entries: int, multimodal: bool
) -> Index:
    def take(dtype: str, count: int, offset: int) -> np.ndarray:
        return np.frombuffer(buffer, dtype=dtype, count=count, offset=offset)

    lengths_at = HEADER.size
    pointers_at = lengths_at + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    modes_at = documents_at + 8 * document_entries
    return Index(
        dtype,
        take("<i4", sequences, lengths_at),
        take("<i8", sequences, pointers_at),
        take("<i8", document_entries, documents_at),
        take("i1", sequences, modes_at) if multimodal else None,
    )


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of at most BLOCK that cover [0, count)."""
    return ((start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))


def _check_sequences(path: Path, index: Index) -> None:
    """Check that each sequence starts at the end of the previous one; otherwise a run would silently read other
    tokens."""
    itemsize = DType.size(index.dtype)
    end = 0
    for start, stop in blocks(len(index.sequence_lengths)):
        lengths = index.sequence_lengths[start:stop]
        pointers = index.sequence_pointers[start:stop]
        if lengths.min() < 0:
            wrong = int(np.argmax(lengths < 0))
            raise DataError(
                f"{path}: sequence {start + wrong} has {lengths[wrong]} tokens (at byte "
                f"{HEADER.size + 4 * (start + wrong)}), expected at least 0; {_AGAIN}"
            )
        borders = np.cumsum(lengths, dtype=np.int64) * itemsize + end
        if pointers[0] != end or not np.array_equal(pointers[1:], borders[:-1]):
            expected = np.concatenate([[end], borders[:-1]])
            wrong = int(np.argmax(pointers != expected))
            raise DataError(
                f"{path}: sequence {start + wrong} begins at byte {pointers[wrong]} of the .bin file (says byte "
                f"{HEADER.size + 4 * len(index.sequence_lengths) + 8 * (start + wrong)}), expected "
                f"{expected[wrong]}, where the one before it ends; {_AGAIN}"
            )
        end = int(borders[-1])


def _check_documents(path: Path, index: Index) -> None:
    """Check that the document index rises from 0 to the last sequence; a single entry 0 is a file without documents."""
    sequences = len(index.sequence_lengths)
    entries = index.document_indices
    if not len(entries) or entries[0] != 0:
        first = entries[0] if len(entries) else "missing"
        raise DataError(f"{path}: entry 0 of the document index is {first}, expected 0; {_AGAIN}")
    for start, stop in blocks(len(entries)):
        before = max(start - 1, 0)
        block = entries[before:stop]
        if (np.diff(block) < 0).any() or block[-1] > sequences:
            wrong = int(np.argmax((np.diff(block, prepend=block[0]) < 0) | (block > sequences)))
            raise DataError(
                f"{path}: entry {before + wrong} of the document index (at byte "
                f"{HEADER.size + 12 * sequences + 8 * (before + wrong)}) is {block[wrong]}, expected "
                f"{block[wrong - 1]} to {sequences}; {_AGAIN}"
            )
    if len(entries) > 1 and entries[-1] != sequences:
        raise DataError(
            f"{path}: the document index (at byte {HEADER.size + 12 * sequences}) ranges from 0 to {entries[-1]}, "
            f"expected 0 to {sequences}: sequences belong to no document; {_AGAIN}"
        )


class IndexedDataset:
    """The sequences of `PREFIX.bin`, located by `PREFIX.idx`.

    `[i]` and `get(i)` return one sequence, `[a:b]` a list of them; a multimodal data set returns (sequence, mode) and
    (sequences, modes). Arrays have the file's dtype and, with `mmap`, are read-only views of the file. DataError on
    opening: a file is missing, is not a token file, has a size that differs from its index, or its index is invalid.
    Token ids are checked by `megatron-inspect-dataset --validate`.
    """

    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True) -> None:
        self.path_prefix = str(path_prefix)
        self._bin = location(get_bin_path(self.path_prefix))
        _check_presence(self.path_prefix)
        # The index is copied to this machine as a whole, because every start reads all of it; tokens are read block by
        # block.
        remote = in_storage(self._bin)
        self._stream = None if remote is None else remote.open_tokens()
        index = self.index = read_index(_index_file(self.path_prefix), multimodal, mmap)
        self.dtype = index.dtype
        self.sequence_lengths = index.sequence_lengths
        self.sequence_pointers = index.sequence_pointers
        self.document_indices = index.document_indices
        self.sequence_modes = index.sequence_modes
        self.itemsize = DType.size(self.dtype)
        self._check_bin()
        self._map = self._mapped() if mmap and self._stream is None else None

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int | slice) -> Any:
        """One sequence, or the list of sequences of a slice with step 1."""
        if not isinstance(index, slice):
            return self.get(index)
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of a token file needs step 1, found {step}; index the sequences one by one")
        sequences = [self._tokens(i, 0, None) for i in range(start, stop)]
        return sequences if self.sequence_modes is None else (sequences, self.sequence_modes[start:stop])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """`length` tokens of a sequence from token `offset` on (by default all remaining ones)."""
        position = idx + len(self) if idx < 0 else idx
        if not 0 <= position < len(self):
            raise IndexError(f"sequence {idx} of {self.path_prefix}, which has {len(self)}")
        tokens = self._tokens(position, offset, length)
        return tokens if self.sequence_modes is None else (tokens, self.sequence_modes[position])

    def tokens(self, first: int, count: int) -> np.ndarray:
        """`count` tokens of the `.bin` file from its token `first` on, across sequences: [count]."""
        return self._read(first * self.itemsize, count)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return int(self.sequence_pointers[-1]) // self.itemsize + int(self.sequence_lengths[-1]) if len(self) else 0

    @property
    def num_documents(self) -> int:
        """Number of closed documents."""
        return len(self.document_indices) - 1

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files of the prefix exist."""
        return location(get_idx_path(path_prefix)).is_file() and location(get_bin_path(path_prefix)).is_file()

    def _tokens(self, index: int, offset: int, length: int | None) -> np.ndarray:
        size = int(self.sequence_lengths[index])
        count = size - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > size:
            raise IndexError(
                f"tokens [{offset}, {offset + count}) of sequence {index} of {self.path_prefix}, which has {size}"
            )
        # Python integers, because the byte position of a token may exceed 32 bits.
        return self._read(int(self.sequence_pointers[index]) + offset * self.itemsize, count)

    def _read(self, position: int, count: int) -> np.ndarray:
        """Read `count` tokens from byte `position` on."""
        end = position + count * self.itemsize
        if self._stream is not None and end <= self._stream.size:
            return np.frombuffer(self._stream.read(position, count * self.itemsize), dtype=self.dtype)
        size = self._bin.stat().st_size if self._map is None else self._map.size()
        if size < end:  # reading beyond the end of a mapped file would kill this process with SIGBUS
            raise DataError(
                f"{self._bin} was truncated after it was opened: it has {size} bytes, expected at least {end}; {_AGAIN}"
            )
        if self._map is None:
            return np.fromfile(self._bin, dtype=self.dtype, count=count, offset=position)
        return np.frombuffer(self._map, dtype=self.dtype, count=count, offset=position)

    def _mapped(self) -> mapping | None:
        if not self._bin.stat().st_size:  # an empty file cannot be mapped
            return None
        with self._bin.open("rb") as file:
            return mapping(file.fileno(), 0, access=ACCESS_READ)

    def _check_bin(self) -> None:
        """Compare the token file's size with the sum of the sequence lengths."""
        needed = self.num_tokens * self.itemsize
        size = self._bin.stat().st_size
        if size != needed:
            fault = "it is truncated" if size < needed else f"no sequence holds the bytes from {needed} on"
            raise DataError(
                f"{self._bin} has {size} bytes, expected {needed} from {get_idx_path(self.path_prefix)} "
                f"({self.num_tokens} tokens of {self.itemsize} bytes): {fault}, or the two files are not from the "
                "same run; copy both again, or prepare the data again"
            )


def in_place_of_pair(path_prefix: str) -> Any:
    """Reader of a feature in place of a pair, such as that of a list of parts; None without one."""
    hooks = [load_hook(feature.token_files) for feature in features() if feature.token_files is not None]
    return next((reader for hook in hooks if (reader := hook(path_prefix)) is not None), None)


def _index_file(path_prefix: str) -> Path:
    """The index on this machine. DataError if it cannot be copied from object storage."""
    path = location(get_idx_path(path_prefix))
    try:
        return local_copy(path)
    except OSError as error:
        raise DataError(f"{path} cannot be copied: {error}") from None


def _check_presence(path_prefix: str) -> None:
    try:
        missing = [p for p in (get_bin_path(path_prefix), get_idx_path(path_prefix)) if not location(p).is_file()]
    except OSError as error:
        raise DataError(f"token file {path_prefix}: {error}") from None
    if not missing:
        return
    way_out = "give the path without .bin or .idx, of files that megatron-preprocess wrote"
    if path_prefix.endswith((".bin", ".idx")):
        way_out = f"give only the prefix, {path_prefix[:-4]}"
    elif location(get_bin_path(f"{path_prefix}_text_document")).is_file():
        way_out = f"did you mean {path_prefix}_text_document?"
    raise DataError(f"token file {path_prefix}: expected {' and '.join(missing)}, found no such file; {way_out}")
