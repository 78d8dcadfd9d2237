"""The sequences of a token file read as one text, without a table of where each begins."""

import numpy as np

from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.errors import DataError


class TokenText:
    """The tokens of a range of a file's sequences, end to end: T of them, numbered from 0.

    Sequences lie back to back in the `.bin` file, so the text is one stretch of it. Only the index of the first
    and the last sequence is read to find it; memory and start-up do not depend on the number of sequences.
    """

    def __init__(self, indexed: IndexedDataset, sequence_range: range) -> None:
        self._indexed = indexed
        self._first, self._last = sequence_range.start, sequence_range.stop - 1
        self._start = self._begin(self._first) if len(sequence_range) else 0
        self._stop = self._end(self._last) if len(sequence_range) else 0

    def __len__(self) -> int:
        """The number of tokens."""
        return self._stop - self._start

    def read(self, first: int, count: int) -> np.ndarray:
        """The tokens [first, first + count): int64 [count].

        DataError: the sequences that hold them do not lie back to back.
        """
        if first < 0 or count < 0 or first + count > len(self):
            raise IndexError(f"tokens [{first}, {first + count}) of a text of {len(self)}")
        begin = self._start + first
        self._check_back_to_back(begin, begin + count)
        return self._indexed.tokens(begin, count).astype(np.int64)

    def _begin(self, sequence: int) -> int:
        """The number, in the whole file, of a sequence's first token."""
        return int(self._indexed.sequence_pointers[sequence]) // self._indexed.itemsize

    def _end(self, sequence: int) -> int:
        return self._begin(sequence) + int(self._indexed.sequence_lengths[sequence])

    def _check_back_to_back(self, begin: int, end: int) -> None:
        """Look at the few sequences that a read touches: a gap would put foreign tokens into the text."""
        pointers, itemsize = self._indexed.sequence_pointers, self._indexed.itemsize
        low = max(int(np.searchsorted(pointers, begin * itemsize, side="right")) - 1, self._first)
        high = min(int(np.searchsorted(pointers, end * itemsize, side="left")) - 1, self._last)
        starts = np.asarray(pointers[low : high + 1])
        ends = starts + self._indexed.sequence_lengths[low : high + 1].astype(np.int64) * itemsize
        if not np.array_equal(ends[:-1], starts[1:]):
            wrong = low + 1 + int(np.flatnonzero(ends[:-1] != starts[1:])[0])
            raise DataError(
                f"{self._indexed.path_prefix}.idx: sequence {wrong} does not begin where sequence {wrong - 1} ends "
                f"(byte {starts[wrong - low]}, expected {ends[wrong - low - 1]}); copy both files "
                "again, or prepare the data again"
            )
