"""Settings of data sets that are built from blends of token files."""

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
    """What `BlendedMegatronDatasetBuilder` builds: either `blend` and `split`, or `blend_per_split`, or mock data.

    `split_matrix` (the part [begin, end) of [0, 1] of each split, None for an empty one) and `mock` follow from them.
    ConfigError: settings that exclude each other.
    """

    random_seed: int
    """Seed of all orders."""
    sequence_length: int
    """Tokens of a sample."""
    blend: Blend | None = None
    """Prefixes of token files, and a weight for each or None for weights by size; divided by `split`."""
    blend_per_split: Sequence[Blend | None] | None = None
    """A blend of its own for each of training, validation and test."""
    multiple_validation_sets: bool | None = None
    """Keep the validation sets of `blend_per_split` apart, as a list."""
    full_validation: bool | None = None
    """Validation reads one epoch of each of its sets: their size has to be None."""
    split: str | None = None
    """Shares of training, validation and test, such as "969,30,1"."""
    split_matrix: list[tuple[float, float] | None] | None = field(init=False, default=None)
    """Follows from `split`."""
    num_dataset_builder_threads: int = 1
    """Files that are worked on at once."""
    path_to_cache: str | None = None
    """Folder for the indices; nothing is written without one."""
    mmap_bin_files: bool = True
    """Map the token files into memory rather than read them."""
    mock: bool = field(init=False, default=False)
    """Made-up text, where neither `blend` nor `blend_per_split` is given."""
    tokenizer: Any = None
    """An object with `eod` and, where there is one, `pad`."""
    mid_level_dataset_surplus: float = 0.005
    """Share of samples that a data set of a blend is asked for beyond its weight."""
    allow_ambiguous_pad_tokens: bool | None = False
    """Take the tokenizer's `pad` for padding even where it is the id of another special token."""
    fast_cache_load: bool = False
    """Accepted, and changes nothing: no process waits for another to build an index."""
    defer_npy_index_mmap: bool = False
    """Accepted, and changes nothing: indices in the cache are mapped, and pages are read when they are used."""

    def __post_init__(self) -> None:
        """Derive the split and check what excludes what."""
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
    """The fractions of training, validation and test: "99,1,0" gives [0.99, 0.01, 0.0]. ConfigError: no such shares."""
    return list(parse_split(split))


def convert_split_vector_to_split_matrix(
    vector_a: Sequence[float], vector_b: Sequence[float] | None = None
) -> list[tuple[float, float] | None]:
    """The part [begin, end) of [0, 1] of each split, None for an empty one.

    [0.99, 0.01, 0] gives [(0, 0.99), (0.99, 1), None]. With a second vector, the part that both give to the split.
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
