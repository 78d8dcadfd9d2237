"""Builds the data sets of training, validation and test."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import Blend, BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split, normalize
from megatron_core.errors import ConfigError
from megatron_core.features.megatron_order.blend_index import samples_per_dataset
from megatron_core.features.megatron_order.build import blend_size

Sizes = Sequence[int | None]
Matrix = Sequence[tuple[float, float] | None]


@dataclass(eq=False)
class BlendedMegatronDatasetBuilder:
    """Builds data sets of class `cls`, and blends of them, for the three splits.

    sizes: required samples of each split; None for one epoch. is_built_on_rank: whether this process needs the data; if
    torch.distributed is initialized and it does not, all three are None. Processes do not wait for each other.
    """

    cls: type[MegatronDataset]
    sizes: Sizes
    is_built_on_rank: Callable[[], bool]
    config: BlendedMegatronDatasetConfig

    def __post_init__(self) -> None:
        for split in Split:
            blend = self._blend_of(split)
            if blend is not None and blend[1] is not None and self.sizes[split.value] is None:
                raise ConfigError(f"the {split.name} data has weights but no size; give the number of samples")

    def build(self) -> list[Any]:
        """Return a data set, a blend, or None for each of training, validation and test.

        With `multiple_validation_sets`, validation is a list of data sets.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized() and not self.is_built_on_rank():
            return [None] * len(Split)
        if self.config.mock:
            return self._splits_of(None, self._matrix, self.sizes)
        if self.config.blend is not None:
            return self._from_one_blend(self.config.blend)
        return [self._from_own_blend(split) for split in Split]

    @property
    def _matrix(self) -> Matrix:
        assert self.config.split_matrix is not None
        return self.config.split_matrix

    def _blend_of(self, split: Split) -> Blend | None:
        """Return the blend of a split."""
        if self.config.blend_per_split is not None and any(self.config.blend_per_split):
            return self.config.blend_per_split[split.value]
        return self.config.blend

    def _from_one_blend(self, blend: Blend) -> list[Any]:
        prefixes, weights = blend
        if len(prefixes) == 1 and weights is None:
            return self._splits_of(prefixes[0], self._matrix, self.sizes)
        datasets = self._all_splits(prefixes, weights, self._matrix, self.sizes)
        return [
            None if part is None else self._blended([parts[number] for parts in datasets], weights, self.sizes[number])
            for number, part in enumerate(self._matrix)
        ]

    def _from_own_blend(self, split: Split) -> Any:
        blend = self._blend_of(split)
        if blend is None:
            return None
        prefixes, weights = blend
        number = split.value
        matrix: list[tuple[float, float] | None] = [None] * len(Split)
        matrix[number] = (0.0, 1.0)
        apart = bool(self.config.multiple_validation_sets) and split is Split.valid
        if apart and self.config.full_validation and self.sizes[number] is not None:
            raise ConfigError(f"full_validation=True needs the size None, not {self.sizes[number]}")
        if len(prefixes) == 1 or apart:
            found = [self._splits_of(prefix, matrix, self.sizes)[number] for prefix in prefixes]
            return found if len(prefixes) > 1 else found[0]
        sizes = [size if i == number else 0 for i, size in enumerate(self.sizes)]
        datasets = self._all_splits(prefixes, weights, matrix, sizes)
        return self._blended([parts[number] for parts in datasets], weights, self.sizes[number])

    def _blended(
        self, datasets: Sequence[MegatronDataset], weights: Sequence[float] | None, size: int | None
    ) -> BlendedDataset:
        lengths = [len(dataset) for dataset in datasets]
        shares = lengths if weights is None else normalize(weights)
        return BlendedDataset(datasets, shares, blend_size(lengths, weights, size), self.config)

    def _all_splits(
        self, prefixes: Sequence[str], weights: Sequence[float] | None, matrix: Matrix, sizes: Sizes
    ) -> list[list[Any]]:
        """Return the splits of every file, built in threads."""
        per_file: list[list[int | None]] = [[None] * len(Split) for _ in prefixes]
        if weights is not None:
            surplus = self.config.mid_level_dataset_surplus
            columns = [samples_per_dataset(size or 0, normalize(weights), surplus) for size in sizes]
            per_file = [list(row) for row in zip(*columns, strict=True)]
        with ThreadPoolExecutor(max_workers=max(1, self.config.num_dataset_builder_threads)) as pool:
            return list(pool.map(self._splits_of, prefixes, [matrix] * len(prefixes), per_file))

    def _splits_of(self, path: str | None, matrix: Matrix, sizes: Sizes) -> list[MegatronDataset | None]:
        """Return the data sets of one file."""
        low_level = self.cls.build_low_level_dataset(path, self.config)
        elements = self.cls.numel_low_level_dataset(low_level)
        datasets: list[MegatronDataset | None] = []
        for split, part, size in zip(Split, matrix, sizes, strict=True):
            if part is None:
                datasets.append(None)
                continue
            begin, end = (round(border * float(elements)) for border in part)
            indices = np.arange(begin, end, dtype=np.int32)
            datasets.append(self.cls(low_level, path, indices, size, split, self.config))
        return datasets
