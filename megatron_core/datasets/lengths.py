"""How long the documents of a token file are: a histogram that takes the same memory for any number of them."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_core.datasets.index_format import get_idx_path
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.validate import blocks
from megatron_core.errors import DataError

# Lengths fall into 16 parts of each factor of 2, so a quantile is known to within 2**(1/16), 4.4 percent.
PARTS = 16
EDGES = np.unique(np.ceil(2.0 ** (np.arange(48 * PARTS + 1) / PARTS)).astype(np.int64))


@dataclass(frozen=True)
class Bar:
    """Documents of [low, high) tokens: how many, and the tokens in them."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Counts of documents and of their tokens by length.

    documents, tokens: int64 [len(EDGES) + 1]; entry 0 is for empty documents, entry i for lengths in
    [EDGES[i - 1], EDGES[i]). unit: what was counted, "documents", or "sequences" in a file that closes no document.
    """

    documents: np.ndarray
    tokens: np.ndarray
    shortest: int
    longest: int
    unit: str

    @property
    def count(self) -> int:
        """Documents in all."""
        return int(self.documents.sum())

    @property
    def mean(self) -> float:
        """Tokens in a document, on average."""
        return float(self.tokens.sum()) / max(self.count, 1)

    def quantile(self, share: float) -> int:
        """The length that this share of the documents does not exceed, to within 4.4 percent."""
        entry = int(np.searchsorted(np.cumsum(self.documents), share * self.count))
        upper = 0 if entry == 0 else int(EDGES[min(entry, len(EDGES) - 1)]) - 1
        return min(max(upper, self.shortest), self.longest)

    def bars(self, parts: int) -> list[Bar]:
        """The histogram with `parts` bars for each factor of 2, from the shortest to the longest document."""
        steps = int(np.ceil(np.log2(self.longest + 1) * parts)) if self.longest else 0
        edges = np.unique(np.ceil(2.0 ** (np.arange(steps + 1) / parts)).astype(np.int64))
        bars = [Bar(0, 1, int(self.documents[0]), 0)]
        for low, high in pairwise(edges.tolist()):
            first, last = np.searchsorted(EDGES, [low, high]) + 1
            bars.append(Bar(low, high, int(self.documents[first:last].sum()), int(self.tokens[first:last].sum())))
        filled = [number for number, bar in enumerate(bars) if bar.documents]
        return bars[filled[0] : filled[-1] + 1] if filled else []


def document_lengths(dataset: IndexedDataset) -> Lengths:
    """The lengths of all documents; of all sequences where no document is closed.

    DataError: the index is damaged, so that a document would have less than no tokens.
    """
    index = dataset.document_indices
    count, unit = (len(index) - 1, "documents") if len(index) > 1 else (len(dataset), "sequences")
    documents, tokens = np.zeros(len(EDGES) + 1, np.int64), np.zeros(len(EDGES) + 1, np.int64)
    shortest, longest = None, 0
    for start, stop in blocks(count):
        lengths = _lengths(dataset, start, stop) if unit == "documents" else dataset.sequence_lengths[start:stop]
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0:
            raise _damaged(dataset)
        shortest, longest = low if shortest is None else min(shortest, low), max(longest, high)
        entries = np.searchsorted(EDGES, lengths, side="right")
        documents += np.bincount(entries, minlength=len(documents))
        # The weights are summed as float64, which counts a block's tokens exactly up to 2**53.
        tokens += np.bincount(entries, weights=lengths, minlength=len(documents)).astype(np.int64)
    return Lengths(documents, tokens, shortest or 0, longest, unit)


def _lengths(dataset: IndexedDataset, start: int, stop: int) -> np.ndarray:
    """Tokens in each of the documents [start, stop): where the next one begins, less where it begins itself."""
    sequences = np.asarray(dataset.document_indices[start : stop + 1])
    if sequences.min() < 0 or sequences.max() > len(dataset):
        raise _damaged(dataset)
    if not len(dataset):
        return np.zeros(stop - start, np.int64)
    itemsize = np.dtype(dataset.dtype).itemsize
    end = int(dataset.sequence_pointers[-1]) + int(dataset.sequence_lengths[-1]) * itemsize
    inside = np.minimum(sequences, len(dataset) - 1)
    return np.diff(np.where(sequences < len(dataset), dataset.sequence_pointers[inside], end)) // itemsize


def _damaged(dataset: IndexedDataset) -> DataError:
    return DataError(
        f"{get_idx_path(dataset.path_prefix)} is damaged: a document ends before it begins, or after the last "
        "sequence; see where with tools/inspect_dataset.py --validate"
    )
