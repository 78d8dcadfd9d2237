"""Combines data sets, blended by weights."""

import math
from collections.abc import Sequence

import numpy as np

from megatron_core.datasets.base import Sample, short_names
from megatron_core.datasets.keyed_dataset import KeyedGPTDataset
from megatron_core.errors import ConfigError

# Shares are rounded to 1 / 65,536; the two tables of a period need less than a megabyte.
PERIOD = 2**16


def parse_blend(data_path: Sequence[str]) -> tuple[tuple[float, ...] | None, tuple[str, ...]]:
    """Weights (None if there are none) and prefixes of a `--data-path`, by Megatron's rule.

    A list of even length whose items 0, 2, 4, ... are numbers is weight prefix weight prefix ...; any other list
    consists of prefixes. ConfigError: only some of those items are numbers, or a weight is not positive.
    """
    items = [item.strip() for item in data_path]
    numbers = [_number(item) for item in items[::2]]
    text = " ".join(items)
    if len(items) == 1 or all(number is None for number in numbers):
        return None, tuple(items)
    if len(items) % 2 or None in numbers:
        raise ConfigError(
            f"--data-path {text}: only some prefixes have a weight; give "
            "weight prefix weight prefix ..., or only prefixes (a prefix that is a number can be written ./5)"
        )
    weights = tuple(number for number in numbers if number is not None)
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"--data-path {text}: weights must be numbers > 0; remove data sets of weight 0")
    return weights, tuple(items[1::2])


class BlendedDataset:
    """Several data sets in an endless order, mixed evenly by weight.

    The order repeats a period of 2**16 slots. A data set with n slots has its slot k at time (k + 0.5) / n, and slots
    are sorted by time; its own items come in their order. So the data set and the item of index i depend only on i.
    Shares are rounded to whole slots (largest remainder); every data set gets at least one.

    weights: None means the sizes of the data sets, in samples per epoch.
    """

    def __init__(self, datasets: Sequence[KeyedGPTDataset], weights: Sequence[float] | None) -> None:
        if not datasets or len(datasets) > PERIOD:
            raise ConfigError(f"a blend of {len(datasets)} data sets; must be between 1 and {PERIOD}")
        if weights is not None and len(weights) != len(datasets):
            raise ConfigError(f"a blend of {len(datasets)} data sets has {len(weights)} weights; give one for each")
        self._datasets = tuple(datasets)
        self.sources = short_names([dataset.source for dataset in datasets])
        self.sequence_length = datasets[0].sequence_length
        self.samples_per_epoch = sum(dataset.samples_per_epoch for dataset in datasets)
        self.slots = slots(weights or [dataset.samples_per_epoch for dataset in datasets])
        self._dataset_of_slot, self._item_of_slot = _period(self.slots)

    def locate(self, index: int) -> tuple[int, int]:
        """Number of the data set of sample `index` >= 0, and the index within it."""
        if index < 0:
            raise IndexError(f"sample {index}: the order starts at 0")
        # The period is short and the same for all data sets, so nothing is stored for each sample of a run.
        period, slot = divmod(index, PERIOD)
        dataset = int(self._dataset_of_slot[slot])
        return dataset, period * self.slots[dataset] + int(self._item_of_slot[slot])

    def source_of(self, index: int) -> int:
        """Number of the data set of a sample."""
        return self.locate(index)[0]

    def taken(self, samples: int) -> tuple[int, ...]:
        """How many of the first `samples` samples come from each data set."""
        periods, remainder = divmod(samples, PERIOD)
        in_last_period = np.bincount(self._dataset_of_slot[:remainder], minlength=len(self.slots))
        return tuple(periods * count + int(extra) for count, extra in zip(self.slots, in_last_period, strict=True))

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        dataset, item = self.locate(index)
        return self._datasets[dataset][item]


def slots(weights: Sequence[float]) -> tuple[int, ...]:
    """Number of slots of each weight in a period: largest remainder, at least one each."""
    total = math.fsum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    counts = [max(1, math.floor(share)) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(0, PERIOD - sum(counts))]:
        counts[i] += 1
    # Needed only if tiny weights were raised to one slot: the largest weights give up slots.
    while sum(counts) > PERIOD:
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


def _period(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The data set and the item of each slot: both int32 [PERIOD]."""
    # The items of a data set are at equal distances, so that every stretch of a period has the weights' shares: a run
    # that ends early has read them, too.
    items = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    datasets = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    times = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    order = np.argsort(times, kind="stable")
    return datasets[order], items[order]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
