"""Rounds over the samples of one epoch."""

from megatron_core.datasets.base import Dataset, Sample
from megatron_core.datasets.permutation import KeyedPermutation


class CyclicDataset:
    """The first `samples` samples of a data set, over and over, each round in an order of its own.

    Item i is sample KeyedPermutation(samples, (seed, round))[k] with round, k = divmod(i, samples).
    """

    def __init__(self, dataset: Dataset, samples: int, seed: int) -> None:
        self.sequence_length = dataset.sequence_length
        self._dataset, self._samples, self._seed = dataset, samples, seed

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        if index < 0:
            raise IndexError(f"sample {index}: the order starts at 0")
        number, place = divmod(index, self._samples)
        return self._dataset[KeyedPermutation(self._samples, (self._seed, number))[place]]
