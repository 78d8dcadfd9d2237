"""Megatron-LM's mock data: sequences 1, 2, 3, ... of random lengths, in Megatron-LM's order."""

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_core.datasets.base import Dataset
from megatron_core.datasets.paths import split_ranges
from megatron_core.features.megatron_order.build import build_megatron_order

THIRDS = (1 / 3, 1 / 3, 1 / 3)
"""Shares of training, validation and test data; Megatron-LM does not read ``--split`` for them."""


class MockSequences:
    """The sequences of Megatron-LM's ``MockGPTLowLevelDataset``, with the interface of an indexed file.

    A sequence of L tokens has 1 ... L - 1, modulo the size of the vocabulary, and the end of a document.
    """

    path_prefix = "--mock-data"
    seed: int = 0
    size: int = 100_000
    max_sequence_length: int = 4096

    def __init__(self, vocab_size: int, eod: int) -> None:
        self._vocab_size = vocab_size
        self._eod = eod
        generator = np.random.default_rng(self.seed)
        self.sequence_lengths = generator.integers(1, self.max_sequence_length, size=self.size, dtype=np.int32)

    def __len__(self) -> int:
        return self.size

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens ``offset ... offset + length - 1`` of a sequence, by default to its end."""
        end = int(self.sequence_lengths[idx])
        stop = end if length is None else min(offset + length, end)
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self._vocab_size
        if stop == end and stop > offset:
            tokens[-1] = self._eod
        return tokens


def build_mock_order(
    vocab_size: int,
    eod: int,
    wanted: Mapping[str, int],
    sequence_length: int,
    seed: int,
    *,
    cache: str | None = None,
    masked_token: int | None = None,
) -> list[Dataset]:
    """The training, validation and test data of a run of Megatron-LM with ``--mock-data``."""
    sequences: Sequence[MockSequences] = [MockSequences(vocab_size, eod)]
    ranges = split_ranges(THIRDS, len(sequences[0]))
    return [
        build_megatron_order(
            sequences, [span], None, wanted[name], sequence_length, seed, name, cache=cache, masked_token=masked_token
        )
        for name, span in zip(("train", "valid", "test"), ranges, strict=True)
    ]
