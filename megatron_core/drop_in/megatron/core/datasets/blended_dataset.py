"""`BlendedDataset`: samples of several data sets in proportion to weights."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import normalize
from megatron_core.errors import ConfigError
from megatron_core.features.megatron_order.build import cached_blend, check_blend
from megatron_core.features.megatron_order.cache import IndexCache


class BlendedDataset(torch.utils.data.Dataset):
    """`size` samples of several data sets in Megatron-LM's order; with size None, weights[d] samples of each.

    Sample i is sample `dataset_sample_index[i]` of data set `dataset_index[i]`. Raises ConfigError unless each data set
    has a weight above 0, which must be an integer if size is None, and DataError if a data set has too few samples.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        _check(datasets, weights, size)
        self.datasets = datasets
        self.split = datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)
        self.size = size
        self.config = config
        cache = IndexCache(config.path_to_cache)
        name = f"{type(self).__name__}-{self.split.name}"
        blend = cached_blend(cache, name, weights, size)
        self.dataset_index, self.dataset_sample_index = blend.dataset_index, blend.dataset_sample_index
        check_blend(blend, [len(d) for d in datasets], [str(d.dataset_path) for d in datasets])

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return a sample of a data set, with the number of the data set as `dataset_id`."""
        number = int(self.dataset_index[idx])
        return {"dataset_id": number, **self.datasets[number][int(self.dataset_sample_index[idx])]}


def _check(datasets: Sequence[MegatronDataset], weights: Sequence[float], size: int | None) -> None:
    if len(datasets) != len(weights) or not all(weight > 0 for weight in weights):
        raise ConfigError(
            f"a blend of {len(datasets)} data sets has the weights {list(weights)}; give a weight above 0 for each"
        )
    if size is None and any(weight != int(weight) for weight in weights):
        raise ConfigError(f"without a size, weights are counts of samples; {list(weights)} must be integers")
