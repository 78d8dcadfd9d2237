"""The two orders of samples: from files and weights to the data set of a split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_core.config import DataConfig
from megatron_core.datasets.base import Dataset
from megatron_core.datasets.blend import BlendedDataset
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.keyed_dataset import KeyedGPTDataset
from megatron_core.datasets.megatron_order import build_megatron_order
from megatron_core.errors import DataError

Wanted = dict[str, int]
"""Samples that a run asks for, by split."""


@dataclass(frozen=True)
class Share:
    """The sequences of a file that belong to a split."""

    indexed: IndexedDataset
    sequences: range


class Order(Protocol):
    """Makes the data set of a split."""

    def blend(
        self, shares: Sequence[Share], weights: Sequence[float] | None, name: str, notes: list[str] | None
    ) -> Dataset | None:
        """One data set from files with weights; None: nothing is left.

        notes: takes a sentence for what is left out because it has too few tokens; None makes that a DataError.
        """
        ...


class KeyedOrder:
    """`--data-order keyed`."""

    def __init__(self, data: DataConfig, seed: int, eod: int | None) -> None:
        self._length, self._seed, self._eod = data.seq_length, seed, eod

    def part(self, share: Share, name: str) -> KeyedGPTDataset:
        """The samples of one file."""
        masked = self._eod is not None
        return KeyedGPTDataset(share.indexed, share.sequences, self._length, self._seed, name, self._eod, masked)

    def blend(
        self, shares: Sequence[Share], weights: Sequence[float] | None, name: str, notes: list[str] | None
    ) -> Dataset | None:
        """The files that have a sample, in the proportions that they have to one another."""
        found = [self._part_or_note(share, name, notes) for share in shares]
        kept = [part for part in found if part is not None]
        if len(kept) < 2:
            return kept[0] if kept else None
        if weights is not None:
            weights = [weight for weight, part in zip(weights, found, strict=True) if part is not None]
        return BlendedDataset(kept, weights)

    def _part_or_note(self, share: Share, name: str, notes: list[str] | None) -> KeyedGPTDataset | None:
        try:
            return self.part(share, name)
        except DataError as error:
            _note(error, notes)
            return None


class MegatronOrder:
    """`--data-order megatron`: what is asked for decides about the order, as in Megatron-LM."""

    def __init__(self, data: DataConfig, seed: int, eod: int | None, wanted: Wanted) -> None:
        self._data, self._seed, self._eod, self._wanted = data, seed, eod, wanted

    def blend(
        self, shares: Sequence[Share], weights: Sequence[float] | None, name: str, notes: list[str] | None
    ) -> Dataset | None:
        """All files, or none where one has too few tokens."""
        try:
            return build_megatron_order(
                [share.indexed for share in shares],
                [share.sequences for share in shares],
                weights,
                self._wanted.get(name),
                self._data.seq_length,
                self._seed,
                name,
                cache=self._data.data_cache_path,
                eod=self._eod,
                eod_mask_loss=self._eod is not None,
                surplus=self._data.mid_level_dataset_surplus,
                threads=self._data.num_dataset_builder_threads,
            )
        except DataError as error:
            _note(error, notes)
            return None


def _note(error: DataError, notes: list[str] | None) -> None:
    if notes is None:
        raise error
    notes.append(f"left out: {error}")
