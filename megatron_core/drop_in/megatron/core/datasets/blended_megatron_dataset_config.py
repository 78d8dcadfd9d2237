"""Settings of blends of token files."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from megatron.core.datasets.utils import Split
from megatron_core.datasets.paths import parse_split
from megatron_core.errors import ConfigError

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
