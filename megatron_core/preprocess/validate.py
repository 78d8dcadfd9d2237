"""Checks a whole token file: lengths, positions and documents in its index, and every token id."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_core.datasets.header import check_counts, read_header
from megatron_core.datasets.indexed import IndexedDataset, get_bin_path, get_idx_path
from megatron_core.errors import DataError
from megatron_core.locations import location

# Tokens checked at a time. A block and its temporaries need about 30 MB; larger ones are not faster.
BLOCK = 1 << 20

AGAIN = "copy both files again, or prepare the data again with megatron-preprocess"

Progress = Callable[[int], object]
"""Called with the number of bytes just checked."""


@dataclass(frozen=True)
class Checked:
    """The result of `validate` for valid files; `vocab_size` None: the upper bound of ids was not checked."""

    sequences: int
    documents: int
    tokens: int
    largest_id: int
    vocab_size: int | None


def validate(path_prefix: str, vocab_size: int | None = None, progress: Progress = lambda size: None) -> Checked:
    """Check the index, the tokens and the header; DataError names the first fault, its position and the fix.

    Lengths are >= 0; each sequence starts at the end of the previous one, the first at 0, and the last ends the .bin
    file; documents are in order and cover all sequences (or none is closed, as in a file without documents); token ids
    are in [0, vocab_size). `vocab_size` None uses the header's; without a header only negative ids are faults. Memory
    is that of one block for any file size; `progress` counts the bytes of both files.
    """
    dataset = IndexedDataset(path_prefix)
    header = read_header(path_prefix)
    if header is not None and vocab_size is None:
        vocab_size = header.vocab_size
    progress(12 * len(dataset) + 8 * len(dataset.document_indices))
    tokens = dataset.num_tokens
    if not tokens:
        raise DataError(
            f"{get_idx_path(path_prefix)}: {len(dataset)} sequences have no tokens; prepare the data again from files "
            "with text"
        )
    largest = _check_tokens(dataset, vocab_size, progress)
    check_counts(header, path_prefix, dataset.num_documents, tokens)
    return Checked(len(dataset), dataset.num_documents, tokens, largest, vocab_size)


def total_bytes(path_prefix: str) -> int:
    """The total of bytes passed to `progress`."""
    dataset = IndexedDataset(path_prefix)
    return location(get_bin_path(path_prefix)).stat().st_size + 12 * len(dataset) + 8 * len(dataset.document_indices)


def _check_tokens(dataset: IndexedDataset, vocab_size: int | None, progress: Progress) -> int:
    """Check that every token id is in the vocabulary; returns the largest one."""
    limit = np.inf if vocab_size is None else vocab_size
    largest = 0
    for start in range(0, dataset.num_tokens, BLOCK):
        ids = dataset.tokens(start, min(BLOCK, dataset.num_tokens - start))
        low, high = ids.min(), ids.max()
        # NaN fails every comparison, so it is rejected here too, as are fractions.
        integral = ids.dtype.kind in "iu" or bool((ids == np.floor(ids)).all())
        if not (low >= 0 and high < limit and integral):
            wrong = int(np.flatnonzero(~((ids >= 0) & (ids < limit) & (ids == np.floor(ids))))[0])
            raise DataError(_wrong_token(dataset, start + wrong, ids[wrong], vocab_size))
        largest = max(largest, int(high))
        progress(ids.nbytes)
    return largest


def _wrong_token(dataset: IndexedDataset, position: int, token: np.number, vocab_size: int | None) -> str:
    itemsize = np.dtype(dataset.dtype).itemsize
    # The last sequence that starts at or before the token; empty ones that start there also come before it.
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
