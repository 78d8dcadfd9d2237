"""Ragged batches, which reveal wrong averages."""

import numpy as np

from megatron_core.datasets.base import Sample
from megatron_core.datasets.keyed_dataset import mix64


class RaggedDataset:
    """Random tokens with loss masks of different lengths; in every seventh sample all tokens are masked.

    Micro-batches and data-parallel ranks have different numbers of unmasked tokens, so that a mean of means, or a
    division in the wrong place, changes the loss and every gradient.
    With ``eod`` on average every sixth token ends a document.
    """

    def __init__(self, vocab_size: int, sequence_length: int, eod: int | None = None) -> None:
        self.vocab_size, self.sequence_length, self.eod = vocab_size, sequence_length, eod

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index`` >= 0 of an infinite sequence."""
        length = self.sequence_length
        text = np.array([mix64(7, index, i) % self.vocab_size for i in range(length + 1)], dtype=np.int64)
        if self.eod is not None:
            text[[mix64(9, index, i) % 6 == 0 for i in range(length + 1)]] = self.eod
        counted = 0 if index % 7 == 3 else 1 + mix64(8, index) % length
        mask = (np.arange(length) < counted).astype(np.float32)
        return Sample(tokens=text[:-1], labels=text[1:], loss_mask=mask)
