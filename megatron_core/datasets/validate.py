"""Checking a whole token file: every length, position and document of its index, and every token id."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_core.datasets.header import get_header_path, read_header
from megatron_core.datasets.indexed import HEADER, IndexedDataset, get_bin_path, get_idx_path
from megatron_core.errors import DataError

# Entries of the index, or tokens, that are looked at together. A block of tokens and what its checks make of it take
# about 30 MB; larger blocks are no faster.
BLOCK = 1 << 20

AGAIN = "copy both files again, or prepare the data again with tools/preprocess_data.py"

Progress = Callable[[int], object]
"""Called with the number of bytes that were just checked."""


@dataclass(frozen=True)
class Checked:
    """What `validate` found in files without a fault; `vocab_size` None: the ids were compared with none."""

    sequences: int
    documents: int
    tokens: int
    largest_id: int
    vocab_size: int | None


def validate(path_prefix: str, vocab_size: int | None = None, progress: Progress = lambda size: None) -> Checked:
    """Check the index, then the tokens, then the header; DataError names the first fault, its position and the way out.

    Lengths are >= 0; each sequence begins where the one before it ends, the first at 0 and the last ends the .bin
    file; documents are in order and hold all sequences (or none is closed, as in a file without documents); token
    ids are in [0, vocab_size). `vocab_size` None takes the header's, and without a header only ids below 0 are faults.
    Memory is that of one block, whatever the size of the files; `progress` counts the bytes of both.
    """
    dataset = IndexedDataset(path_prefix)
    header = read_header(path_prefix)
    if header is not None and vocab_size is None:
        vocab_size = header.vocab_size
    tokens = _check_sequences(dataset, progress)
    _check_bin_size(dataset, tokens)
    documents = _check_documents(dataset, progress)
    largest = _check_tokens(dataset, vocab_size, progress)
    found = Checked(len(dataset), documents, tokens, largest, vocab_size)
    if header is not None:
        for name in ("documents", "tokens"):
            if getattr(header, name) != getattr(found, name):
                raise DataError(
                    f"{get_header_path(path_prefix)} says {name}={getattr(header, name)}, and the files hold "
                    f"{getattr(found, name)}: they are not of one run; {AGAIN}"
                )
    return found


def total_bytes(path_prefix: str) -> int:
    """What `progress` has counted in the end."""
    dataset = IndexedDataset(path_prefix)
    return Path(get_bin_path(path_prefix)).stat().st_size + 12 * len(dataset) + 8 * len(dataset.document_indices)


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """Successive ranges [start, stop) of at most BLOCK that make up [0, count)."""
    return ((start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))


def _check_sequences(dataset: IndexedDataset, progress: Progress) -> int:
    """Lengths and positions of the sequences; the number of tokens in them."""
    path, itemsize, tokens = get_idx_path(dataset.path_prefix), np.dtype(dataset.dtype).itemsize, 0
    pointers_at = HEADER.size + 4 * len(dataset)
    for start, stop in blocks(len(dataset)):
        lengths = dataset.sequence_lengths[start:stop].astype(np.int64)
        wrong = np.flatnonzero(lengths < 0)[:1]
        if len(wrong):
            sequence = start + int(wrong[0])
            raise DataError(
                f"{path}: sequence {sequence} has {lengths[wrong[0]]} tokens (at byte {HEADER.size + 4 * sequence}), "
                f"expected at least 0; {AGAIN}"
            )
        borders = np.concatenate([[tokens], tokens + np.cumsum(lengths)])
        found = dataset.sequence_pointers[start:stop]
        wrong = np.flatnonzero(found != borders[:-1] * itemsize)[:1]
        if len(wrong):
            sequence = start + int(wrong[0])
            raise DataError(
                f"{path}: sequence {sequence} begins at byte {found[wrong[0]]} of the .bin file (says byte "
                f"{pointers_at + 8 * sequence}), expected {borders[wrong[0]] * itemsize}, where the one before it "
                f"ends; {AGAIN}"
            )
        tokens = int(borders[-1])
        progress(12 * (stop - start))
    if not tokens:
        raise DataError(f"{path}: no token in {len(dataset)} sequences; prepare the data again from files with text")
    return tokens


def _check_bin_size(dataset: IndexedDataset, tokens: int) -> None:
    path = Path(get_bin_path(dataset.path_prefix))
    expected, size = tokens * np.dtype(dataset.dtype).itemsize, path.stat().st_size
    if size != expected:
        fault = "it is cut off" if size < expected else f"no sequence holds those from byte {expected} on"
        raise DataError(
            f"{path} has {size} bytes, expected {expected} for the {tokens} tokens of "
            f"{get_idx_path(dataset.path_prefix)}: {fault}, or the two files are not of one run; {AGAIN}"
        )


def _check_documents(dataset: IndexedDataset, progress: Progress) -> int:
    """The document index counts up from 0 to the number of sequences, or is 0 alone; the number of documents."""
    path, index = get_idx_path(dataset.path_prefix), dataset.document_indices
    at = HEADER.size + 12 * len(dataset)
    before = 0
    for start, stop in blocks(len(index)):
        entries = np.concatenate([[before], index[start:stop]])
        wrong = np.flatnonzero((np.diff(entries) < 0) | (entries[1:] > len(dataset)))[:1]
        if len(wrong):
            document = start + int(wrong[0])
            raise DataError(
                f"{path}: entry {document} of the document index (at byte {at + 8 * document}) is "
                f"{entries[wrong[0] + 1]}, expected {entries[wrong[0]]} to {len(dataset)}; {AGAIN}"
            )
        before = int(entries[-1])
        progress(8 * (stop - start))
    first = int(index[0]) if len(index) else None
    if first != 0 or (len(index) > 1 and before != len(dataset)):
        raise DataError(
            f"{path}: the document index (at byte {at}) goes from {first} to {before if len(index) else None}, "
            f"expected 0 to {len(dataset)}: sequences belong to no document; {AGAIN}"
        )
    return len(index) - 1


def _check_tokens(dataset: IndexedDataset, vocab_size: int | None, progress: Progress) -> int:
    """Every token id is in the vocabulary; the largest one."""
    path, dtype, largest = get_bin_path(dataset.path_prefix), np.dtype(dataset.dtype).newbyteorder("<"), 0
    limit = np.inf if vocab_size is None else vocab_size
    start = 0
    with open(path, "rb") as file:
        while len(ids := np.frombuffer(file.read(BLOCK * dtype.itemsize), dtype=dtype)):
            low, high = ids.min(), ids.max()
            # Not a number is below no limit, so it fails here too, as does a fraction.
            whole = dtype.kind in "iu" or bool((ids == np.floor(ids)).all())
            if not (low >= 0 and high < limit and whole):
                wrong = int(np.flatnonzero(~((ids >= 0) & (ids < limit) & (ids == np.floor(ids))))[0])
                raise DataError(_wrong_token(dataset, start + wrong, ids[wrong], vocab_size))
            largest = max(largest, int(high))
            start += len(ids)
            progress(ids.nbytes)
    return largest


def _wrong_token(dataset: IndexedDataset, position: int, token: np.number, vocab_size: int | None) -> str:
    itemsize = np.dtype(dataset.dtype).itemsize
    # The last sequence that begins at or before the token; empty ones that begin there too come before it.
    sequence = int(np.searchsorted(dataset.sequence_pointers, position * itemsize, side="right")) - 1
    offset = position - int(dataset.sequence_pointers[sequence]) // itemsize
    expected = "at least 0" if vocab_size is None else f"0 to {vocab_size - 1}, the ids of a vocabulary of {vocab_size}"
    way_out = (
        AGAIN
        if vocab_size is None
        else ("give the --vocab-size or tokenizer that the file was made with, or prepare the data again")
    )
    return (
        f"{get_bin_path(dataset.path_prefix)}: the token id {token} (sequence {sequence}, token {offset}, byte "
        f"{position * itemsize}), expected {expected}; {way_out}"
    )
