"""Data sets in keyed order: keyed permutation, token text, repeated rounds and synthetic data."""

from math import isqrt
from typing import Any

import numpy as np

from megatron_core.datasets.base import Dataset, Sample, sources_of
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.errors import ConfigError, DataError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# With a good round function, four rounds give a pseudo-random permutation (Luby and Rackoff 1988); small domains need
# more, and eight take about 10 microseconds per sample.
ROUNDS = 8


def mix64(*values: int) -> int:
    """A 64-bit hash of integers that depends on their order and count.

    Each value, modulo 2**64, is mixed in with the finaliser of splitmix64 (Steele, Lea and Flood 2014).
    """
    state = len(values)
    for value in values:
        state = _finalise(((state + _GOLDEN) & _MASK) ^ _finalise((value + _GOLDEN) & _MASK))
    return state


class KeyedPermutation:
    """A permutation of range(size) determined by a key: `p[i]`, in constant memory.

    A Feistel network on pairs (left in [0, a), right in [0, b)) with a * b >= size. A result beyond the end is passed
    through the network again until it is inside (cycle walking; Black and Rogaway 2002), which keeps it a bijection. a
    * b exceeds size by less than a, so a second pass is rare.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} numbers: size must be at least 1")
        self._size = size
        self._left = isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        self._round_keys = tuple(mix64(*key, number) for number in range(ROUNDS))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        """The number at a position, 0 <= index < size."""
        if not 0 <= index < self._size:
            raise IndexError(f"position {index} of a permutation of {self._size}")
        position = self._pass(index)
        while position >= self._size:
            position = self._pass(position)
        return position

    def _pass(self, position: int) -> int:
        left, right = divmod(position, self._right)
        for number, key in enumerate(self._round_keys):
            # Each round is invertible: it adds to one half a function of only the other half.
            if number % 2:
                left = (left + _finalise(key ^ right)) % self._left
            else:
                right = (right + _finalise(key ^ left)) % self._right
        return left * self._right + right


def _finalise(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class TokenText:
    """The T tokens of a range of a file's sequences as one text.

    Sequences are contiguous in the `.bin` file, so the text is too. Only the index entries of the first and the last
    sequence are read; memory and start-up time do not depend on the number of sequences.
    """

    def __init__(self, indexed: IndexedDataset, sequence_range: range) -> None:
        self._indexed = indexed
        self._start = self._begin(sequence_range.start) if len(sequence_range) else 0
        self._stop = self._end(sequence_range.stop - 1) if len(sequence_range) else 0

    def __len__(self) -> int:
        return self._stop - self._start

    def read(self, first: int, count: int) -> np.ndarray:
        """The tokens [first, first + count): int64 [count]."""
        if first < 0 or count < 0 or first + count > len(self):
            raise IndexError(f"tokens [{first}, {first + count}) of a text of {len(self)}")
        return self._indexed.tokens(self._start + first, count).astype(np.int64)

    def _begin(self, sequence: int) -> int:
        """Position in the file of a sequence's first token."""
        return int(self._indexed.sequence_pointers[sequence]) // self._indexed.itemsize

    def _end(self, sequence: int) -> int:
        return self._begin(sequence) + int(self._indexed.sequence_lengths[sequence])


class KeyedGPTDataset:
    """Samples of L tokens from a range of a file's sequences, in an endless order.

    The sequences are read as one text of T tokens, across document boundaries. An epoch has n = (T - 1) // L samples;
    sample j has the tokens [j L, j L + L], the last of them only as a label. Item i is sample KeyedPermutation(n,
    (seed, epoch))[k] with epoch, k = divmod(i, n): no index is built or stored.

    loss_mask is 0 where the input token is `masked_token`. DataError: the range has too few tokens for one sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_range: range,
        sequence_length: int,
        seed: int,
        split_name: str = "train",
        masked_token: int | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self.source = indexed.path_prefix
        self._text = TokenText(indexed, sequence_range)
        self._seed = seed
        self._masked_token = masked_token
        self.samples_per_epoch = (self.num_tokens - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{indexed.path_prefix}: the {split_name} split has {self.num_tokens} tokens in "
                f"{len(sequence_range)} sequences, and one sample needs {sequence_length + 1} (--seq-length "
                f"{sequence_length} and the label of the last token); prepare more text, change --split, or "
                "lower --seq-length"
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the range."""
        return len(self._text)

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        if index < 0:
            raise IndexError(f"sample {index}: the order starts at 0")
        # The epoch is a part of the key, so that each one has another order and any sample can be found without the
        # ones before it: a run may resume at any step.
        epoch, position = divmod(index, self.samples_per_epoch)
        number = KeyedPermutation(self.samples_per_epoch, (self._seed, epoch))[position]
        text = self._text.read(number * self.sequence_length, self.sequence_length + 1)
        tokens = text[:-1]
        loss_mask = np.ones(self.sequence_length, dtype=np.float32)
        if self._masked_token is not None:
            loss_mask[tokens == self._masked_token] = 0.0
        return Sample(tokens=tokens, labels=text[1:], loss_mask=loss_mask)


class CyclicDataset:
    """The first `samples` samples of a data set, repeated, each round in a different order.

    Item i is sample KeyedPermutation(samples, (seed, round))[k] with round, k = divmod(i, samples).
    """

    def __init__(self, dataset: Dataset, samples: int, seed: int) -> None:
        self.sequence_length = dataset.sequence_length
        self._dataset: Any = dataset
        self._samples = samples
        self._seed = seed
        self.sources = sources_of(dataset)

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        if index < 0:
            raise IndexError(f"sample {index}: the order starts at 0")
        return self._dataset[self._inner(index)]

    def source_of(self, index: int) -> int:
        """Number in `sources` of the data set of a sample."""
        return self._dataset.source_of(self._inner(index))

    def _inner(self, index: int) -> int:
        number, position = divmod(index, self._samples)
        return KeyedPermutation(self._samples, (self._seed, number))[position]


STEPS = 8


class MockDataset:
    """Arithmetic sequences modulo the vocabulary size; start and step are functions of (seed, index).

    The step is one of eight, so that a model must read two tokens to predict the next.
    """

    def __init__(self, vocab_size: int, sequence_length: int, seed: int) -> None:
        if vocab_size < 2:
            raise ConfigError(f"--mock-data needs a --vocab-size of at least 2, found {vocab_size}")
        self.sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._seed = seed

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        if index < 0:
            raise IndexError(f"sample {index}: the order starts at 0")
        start = mix64(self._seed, index, 0) % self._vocab_size
        step = 1 + mix64(self._seed, index, 1) % min(STEPS, self._vocab_size - 1)
        text = (start + step * np.arange(self.sequence_length + 1, dtype=np.int64)) % self._vocab_size
        mask = np.ones(self.sequence_length, dtype=np.float32)
        return Sample(tokens=text[:-1], labels=text[1:], loss_mask=mask)
