"""Reading an `.idx` file, with a sentence for everything that can be wrong with it."""

from pathlib import Path

import numpy as np

from megatron_core.datasets.index_format import HEADER, MAGIC, VERSION, DType, Index, index_bytes
from megatron_core.errors import DataError


def read_index(path: Path, multimodal: bool, mmap: bool) -> Index:
    """The arrays of the index file at `path`, mapped into memory or read; DataError if it is not whole."""
    size = path.stat().st_size
    if size < HEADER.size:
        raise DataError(f"{path} is cut off: it has {size} bytes and the header alone has {HEADER.size}; {_AGAIN}")
    buffer = np.memmap(path, dtype=np.uint8, mode="r") if mmap else np.fromfile(path, dtype=np.uint8)
    dtype, sequences, document_entries = _read_header(path, buffer)
    _check_size(path, size, sequences, document_entries, multimodal)
    index = _arrays(buffer, dtype, sequences, document_entries, multimodal)
    _check_arrays(path, index)
    return index


_AGAIN = "copy it again, or prepare the data again with tools/preprocess_data.py"


def _read_header(path: Path, buffer: np.ndarray) -> tuple[type[np.number], int, int]:
    magic, version, code, sequences, document_entries = HEADER.unpack(buffer[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(
            f"{path} is not an index of a token file: it begins with {magic!r}, expected {MAGIC!r}; "
            "give the prefix of files that tools/preprocess_data.py wrote"
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
    found = f"{path} has {size} bytes, expected {expected} for {counts}"
    if multimodal and sequences and size == index_bytes(sequences, document_entries, multimodal=False):
        raise DataError(f"{found} with modes: it was not written as multimodal; open it with multimodal=False")
    if size < expected:
        raise DataError(f"{found}: it is cut off; {_AGAIN}")
    # A multimodal file read as plain text is fine: its modes come last and are left alone.
    if size not in (expected, index_bytes(sequences, document_entries, multimodal=True)):
        raise DataError(f"{found}: it is longer than its header says; {_AGAIN}")


def _arrays(
    buffer: np.ndarray, dtype: type[np.number], sequences: int, document_entries: int, multimodal: bool
) -> Index:
    def take(kind: str, count: int, offset: int) -> np.ndarray:
        return np.frombuffer(buffer, dtype=kind, count=count, offset=offset)

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


def _check_arrays(path: Path, index: Index) -> None:
    # No document need be closed (one entry, 0); none may reach past the sequences.
    documents = index.document_indices
    sequences = len(index.sequence_lengths)
    if not len(documents) or documents[0] != 0 or documents[-1] > sequences:
        ends = f"{documents[0]} to {documents[-1]}" if len(documents) else "empty"
        raise DataError(f"{path} has a document index of {ends}, expected 0 to {sequences}; {_AGAIN}")
