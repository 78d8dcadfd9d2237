"""For Megatron Core's users: `BlendedDataset`, several data sets drawn from in proportion to weights."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import normalize
from megatron_core.datasets.megatron_order.build import cached_blend, check_blend
from megatron_core.datasets.megatron_order.cache import IndexCache
from megatron_core.errors import ConfigError


class BlendedDataset(torch.utils.data.Dataset):
    """`size` samples of several data sets in Megatron-LM's order; with size None, weights[d] samples of each.

    `dataset_index` and `dataset_sample_index` say which data set sample i is drawn from, and which of its samples.
    ConfigError: not one weight above 0 for each data set, or with size None one that is no whole number.
    DataError: a data set has fewer samples than are drawn from it.
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
        """A sample of one of the data sets, and as `dataset_id` the number of that."""
        number = int(self.dataset_index[idx])
        return {"dataset_id": number, **self.datasets[number][int(self.dataset_sample_index[idx])]}


def _check(datasets: Sequence[MegatronDataset], weights: Sequence[float], size: int | None) -> None:
    if len(datasets) != len(weights) or not all(weight > 0 for weight in weights):
        raise ConfigError(
            f"a blend of {len(datasets)} data sets with the weights {list(weights)}; give one above 0 for each"
        )
    if size is None and any(weight != int(weight) for weight in weights):
        raise ConfigError(f"a blend without a size draws what its weights say; {list(weights)} are no counts")
