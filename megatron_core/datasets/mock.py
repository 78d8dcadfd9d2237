"""Made-up text for `--mock-data`: no file, and a pattern that a model can learn."""

import numpy as np

from megatron_core.datasets.base import Sample
from megatron_core.datasets.permutation import mix64
from megatron_core.errors import ConfigError

STEPS = 8


class MockDataset:
    """Arithmetic sequences modulo the vocabulary's size; start and step are functions of (seed, index).

    The step is one of eight, so that a model has to look back at two tokens to know the next.
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
