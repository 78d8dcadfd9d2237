"""Settings, base class and blends of data sets, and the builder of those of training, validation and test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from megatron_core.datasets.blend import parse_blend
from megatron_core.datasets.paths import parse_split
from megatron_core.errors import ConfigError
from megatron_core.features.megatron_order.blend_index import normalize, samples_per_dataset
from megatron_core.features.megatron_order.build import NO_PAD, blend_size, cached_blend, check_blend
from megatron_core.features.megatron_order.cache import IndexCache


class Split(Enum):
    """The three uses of data."""

    train = 0
    valid = 1
    test = 2


def get_blend_from_list(blend: Sequence[str] | None) -> tuple[list[str], list[float] | None] | None:
    """Return (prefixes, weights or None) of a list `weight prefix weight prefix ...` or of prefixes only.

    None for a list without entries, such as ``args.data_path`` of a launch without ``--data-path``.

    Raises ConfigError if some but not all of the weights are numbers.
    """
    if not blend:
        return None
    weights, prefixes = parse_blend([str(item) for item in blend])
    return list(prefixes), None if weights is None else list(weights)


Blend = tuple[Sequence[str], Sequence[float] | None]


@dataclass
class BlendedMegatronDatasetConfig:
    """Settings of `BlendedMegatronDatasetBuilder`: `blend` and `split`, or `blend_per_split`, or neither for mock data.

    `split_matrix` (the part [begin, end) of [0, 1] of each split, None for an empty one) and `mock` are derived. Raises
    ConfigError for conflicting settings.
    """

    random_seed: int
    """Seed of all orders."""
    sequence_length: int
    """Tokens of a sample."""
    blend: Blend | None = None
    """Prefixes of token files, and a weight for each or None for weights by size; divided by `split`."""
    blend_per_split: Sequence[Blend | None] | None = None
    """One blend for each of training, validation and test."""
    multiple_validation_sets: bool | None = None
    """Keep the validation sets of `blend_per_split` separate, as a list."""
    full_validation: bool | None = None
    """Validation reads one epoch of each of its sets: their size must be None."""
    split: str | None = None
    """Shares of training, validation and test, such as "969,30,1"."""
    split_matrix: list[tuple[float, float] | None] | None = field(init=False, default=None)
    """Derived from `split`."""
    num_dataset_builder_threads: int = 1
    """Number of files processed at the same time."""
    path_to_cache: str | None = None
    """Folder for the indices; None: they are not written."""
    mmap_bin_files: bool = True
    """Map the token files into memory instead of reading them."""
    mock: bool = field(init=False, default=False)
    """Generated text, without `blend` and `blend_per_split`."""
    tokenizer: Any = None
    """An object with `eod` and optionally `pad`."""
    mid_level_dataset_surplus: float = 0.005
    """Fraction of samples requested of a data set in a blend beyond its weight."""
    allow_ambiguous_pad_tokens: bool | None = False
    """Use the tokenizer's `pad` for padding even if it is the id of another special token."""
    fast_cache_load: bool = False
    """No effect: processes do not wait for each other to build an index."""
    defer_npy_index_mmap: bool = False
    """No effect: indices in the cache are mapped, and their pages are read on use."""

    def __post_init__(self) -> None:
        """Derive the split and check conflicting settings."""
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blends_per_split(self.blend_per_split)
            return
        self.mock = self.blend is None
        if self.blend is not None:
            _check_weights("blend", self.blend)
            if self.split is None:
                raise ConfigError('blend needs split, the shares of training, validation and test, such as "969,30,1"')
        self.split = "1,1,1" if self.mock or self.split is None else self.split
        self.split_matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split))

    def _check_blends_per_split(self, blends: Sequence[Blend | None]) -> None:
        if self.blend is not None or self.split is not None:
            raise ConfigError("blend_per_split gives each split its own files; leave blend and split out")
        if len(blends) != len(Split):
            raise ConfigError(f"blend_per_split has {len(blends)} entries; give {len(Split)}, None for an empty split")
        for split, blend in zip(Split, blends, strict=True):
            if blend is not None:
                _check_weights(f"blend_per_split[{split.value}]", blend)


def parse_and_normalize_split(split: str) -> list[float]:
    """Return the fractions of training, validation and test: "99,1,0" gives [0.99, 0.01, 0.0]."""
    return list(parse_split(split))


def convert_split_vector_to_split_matrix(
    vector_a: Sequence[float], vector_b: Sequence[float] | None = None
) -> list[tuple[float, float] | None]:
    """Return the part [begin, end) of [0, 1] of each split, None for an empty one.

    [0.99, 0.01, 0] gives [(0, 0.99), (0.99, 1), None]. With a second vector, the part is the intersection of both.
    """
    parts = zip(_parts(vector_a), _parts(vector_a if vector_b is None else vector_b), strict=True)
    shared = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in parts]
    return [part if part[0] < part[1] else None for part in shared]


def _parts(vector: Sequence[float]) -> list[tuple[float, float]]:
    return list(pairwise(accumulate(vector, initial=0)))


def _check_weights(name: str, blend: Blend) -> None:
    prefixes, weights = blend
    if weights is not None and len(weights) != len(prefixes):
        raise ConfigError(f"{name} has {len(prefixes)} prefixes and {len(weights)} weights; give one for each, or None")


LowLevelDataset = Any


@dataclass(eq=False)
class MegatronDataset(ABC, torch.utils.data.Dataset):
    """A data set over some elements (`indices`) of a file, for one split: the base of `GPTDataset` and of users'
    classes.

    A subclass defines `__len__`, `__getitem__`, and the two static methods with which the builder opens files.
    num_samples: required number of samples; None for one epoch.
    """

    dataset: LowLevelDataset
    dataset_path: str | None
    indices: np.ndarray
    num_samples: int | None
    index_split: Split
    config: BlendedMegatronDatasetConfig

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Return the number of elements of a file, which `split` divides."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> LowLevelDataset:
        """Open a file."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return sample `idx`."""


def pad_token_id(tokenizer: Any, allow_ambiguous: bool | None) -> int:
    """Return the tokenizer's `pad`; -1, which is not a token, without `pad` or if it equals another special token.

    So a real end of document is never taken for padding; `allow_ambiguous` permits it.
    """
    pad = _attribute(tokenizer, "pad")
    if pad is None:
        return NO_PAD
    named = _attribute(tokenizer, "special_tokens_dict") or {}
    special = [token for name, token in named.items() if name != "pad_token"]
    special = special or [_attribute(tokenizer, "eos"), _attribute(tokenizer, "eod")]
    return NO_PAD if pad in special and not allow_ambiguous else int(pad)


def _attribute(tokenizer: Any, name: str) -> Any:
    """Return an attribute; None if it does not exist or is not implemented."""
    try:
        return getattr(tokenizer, name, None)
    except NotImplementedError:
        return None


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
