"""The `.idx` file, byte for byte as Megatron's; what a `.bin` file holds is written in it.

    offset        type        content
    0             9 bytes     magic
    9             uint64      version
    17            uint8       code of the tokens' dtype
    18            uint64      S, number of sequences
    26            uint64      D, entries of the document index
    34            int32 * S   tokens in each sequence
    34 + 4S       int64 * S   where each sequence starts in the .bin file, in bytes
    34 + 12S      int64 * D   document index: document d is the sequences [index[d], index[d + 1])
    34 + 12S + 8D int8 * S    mode of each sequence, in multimodal files only (nothing in the file says so)

All little-endian.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

# Below this many tokens Megatron stores two bytes a token; it could be 65,536, but then files would differ.
SMALL_VOCABULARY = 65500


class DType(IntEnum):
    """The codes of the dtypes that tokens can have (float64 comes before float32, as Megatron has it)."""

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
        """The code of a numpy dtype; KeyError if the format has none for it."""
        return cls[np.dtype(value).name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.number]:
        """The numpy scalar type of a code; ValueError if there is no such code."""
        return np.dtype(cls(value).name).type

    @staticmethod
    def size(key: "int | npt.DTypeLike") -> int:
        """Bytes of one token, from a code or from a dtype."""
        if isinstance(key, int):
            key = DType.dtype_from_code(key)
        return np.dtype(key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number]:
        """The dtype in which a vocabulary of this many tokens is stored."""
        return np.uint16 if cardinality is not None and cardinality < SMALL_VOCABULARY else np.int32


@dataclass(frozen=True)
class Index:
    """The arrays of an `.idx` file.

    sequence_lengths: int32 [S], tokens. sequence_pointers: int64 [S], bytes. document_indices: int64 [D].
    sequence_modes: int8 [S], None unless multimodal.
    """

    dtype: type[np.number]
    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    document_indices: np.ndarray
    sequence_modes: np.ndarray | None = None


def get_idx_path(path_prefix: str) -> str:
    """The index file's path."""
    return f"{path_prefix}.idx"


def get_bin_path(path_prefix: str) -> str:
    """The token file's path."""
    return f"{path_prefix}.bin"


def index_bytes(sequences: int, document_entries: int, multimodal: bool) -> int:
    """The size of an `.idx` file, in bytes."""
    return HEADER.size + (4 + 8 + (1 if multimodal else 0)) * sequences + 8 * document_entries


def pointers(sequence_lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Where each sequence starts, in bytes: int64 [S], since a .bin file outgrows 2**31 bytes soon."""
    starts = np.zeros(len(sequence_lengths), dtype=np.int64)
    np.cumsum(sequence_lengths[:-1], dtype=np.int64, out=starts[1:])
    return starts * itemsize


def write_index(file: BinaryIO, index: Index) -> None:
    """Write the whole content of an `.idx` file."""
    code = DType.code_from_dtype(index.dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, len(index.sequence_lengths), len(index.document_indices)))
    file.write(index.sequence_lengths.astype("<i4").tobytes())
    file.write(index.sequence_pointers.astype("<i8").tobytes())
    file.write(index.document_indices.astype("<i8").tobytes())
    if index.sequence_modes is not None:
        file.write(index.sequence_modes.astype("i1").tobytes())
