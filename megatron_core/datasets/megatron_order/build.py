"""From token files, weights and a number of samples to one data set in Megatron's order."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megatron_core.datasets.base import Dataset
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.megatron_order.blend_index import (
    BlendIndex,
    build_blend_index,
    build_exhaustive_blend_index,
    normalize,
    samples_per_dataset,
)
from megatron_core.datasets.megatron_order.cache import IndexCache
from megatron_core.datasets.megatron_order.dataset import NO_PAD, MegatronOrderedBlend, MegatronOrderedDataset
from megatron_core.datasets.megatron_order.order import OrderOptions, cached_order
from megatron_core.errors import ConfigError, DataError

SURPLUS = 0.005


def build_megatron_order(
    indexed: Sequence[IndexedDataset],
    ranges: Sequence[range],
    weights: Sequence[float] | None,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    split_name: str = "train",
    *,
    cache: Path | str | None = None,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    pad: int = NO_PAD,
    drop_last_partial: bool = True,
    surplus: float = SURPLUS,
    threads: int = 1,
) -> Dataset:
    """The sequences `ranges[d]` of each file, in the order in which Megatron-LM would read them.

    - One file and no weights: `num_samples` are asked of it (None: one epoch).
    - Weights, even a single one: of N samples, each is asked for ceil(ceil(N w) (1 + surplus)), and they are blended.
    - Several files and no weights: each gives one epoch; they are blended by their sizes into N samples at most, or
      all of them where `num_samples` is None.

    cache: a folder for the indices; nothing is written without one. threads: files that are worked on at once.
    pad: the id that fills a last sample that is short (`drop_last_partial=False`), and whose labels do not count.
    ConfigError: weights without a number of samples, or not one for each file. DataError: a file without a sample.
    """
    if weights is not None and (num_samples is None or len(weights) != len(indexed)):
        raise ConfigError(
            f"a blend of {len(indexed)} data sets with {len(weights)} weights and {num_samples} samples; "
            "weights need one for each data set, and a number of samples"
        )
    store = IndexCache(cache)
    asked = _asked(len(indexed), weights, num_samples, surplus)

    def build(number: int) -> MegatronOrderedDataset:
        file, sequences = indexed[number], ranges[number]
        options = OrderOptions(sequence_length, asked[number], seed, drop_last_partial=drop_last_partial)
        check_tokens(file.path_prefix, split_name, file.sequence_lengths[sequences.start : sequences.stop], options)
        name = f"GPTDataset-{split_name}"
        order = cached_order(store, name, file.sequence_lengths, np.arange(sequences.start, sequences.stop), options)
        return MegatronOrderedDataset(file, order, options, split_name, pad, eod, eod_mask_loss)

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        datasets = list(pool.map(build, range(len(indexed))))
    if len(datasets) == 1 and weights is None:
        return datasets[0]
    lengths = [len(dataset) for dataset in datasets]
    size = blend_size(lengths, weights, num_samples)
    # The builder and the blend of Megatron-LM each normalise, and the second time may move a last bit.
    shares = lengths if weights is None else normalize(weights)
    blend = cached_blend(store, f"BlendedDataset-{split_name}", shares, size)
    check_blend(blend, lengths, [file.path_prefix for file in indexed])
    return MegatronOrderedBlend(datasets, blend, split_name)


def _asked(number: int, weights: Sequence[float] | None, num_samples: int | None, surplus: float) -> list[int | None]:
    """How many samples each of the data sets is asked for; None for one epoch."""
    if weights is not None:
        return list(samples_per_dataset(num_samples or 0, normalize(weights), surplus))
    return [num_samples] if number == 1 else [None] * number


def blend_size(lengths: Sequence[int], weights: Sequence[float] | None, num_samples: int | None) -> int | None:
    """The length of a blend of data sets of these lengths; None where it draws all of their samples."""
    if num_samples is None:
        return None
    if weights is None:
        return min(num_samples, sum(lengths))
    return sum(samples_per_dataset(num_samples, normalize(weights)))


def cached_blend(cache: IndexCache, name: str, weights: Sequence[float], size: int | None) -> BlendIndex:
    """The order of a blend, through the cache; with size None, `weights` are lengths, and all samples are drawn."""
    if size is None:
        lengths = [int(weight) for weight in weights]
        arrays = cache.get(
            name, {"lengths": lengths}, BlendIndex._fields, lambda: build_exhaustive_blend_index(lengths)._asdict()
        )
    else:
        shares = normalize(weights)
        key = {"weights": [share.hex() for share in shares], "size": size}
        arrays = cache.get(name, key, BlendIndex._fields, lambda: build_blend_index(shares, size)._asdict())
    return BlendIndex(**arrays)


def check_tokens(path: str, split_name: str, lengths: np.ndarray, options: OrderOptions) -> None:
    """DataError where a file has no sample, or no token, to give to a split."""
    tokens = int(lengths.sum(dtype=np.int64))
    needed = 1 if options.num_samples is not None else options.sequence_length + options.extra_tokens
    if options.num_samples is None and not options.drop_last_partial:
        needed = 1 + options.extra_tokens
    if tokens < needed:
        raise DataError(
            f"{path}: the {split_name} split has {tokens} tokens in {len(lengths)} sequences, and {needed} are needed "
            f"for one sample (--seq-length {options.sequence_length}); prepare more text, change --split, or lower "
            "--seq-length"
        )


def check_blend(blend: BlendIndex, lengths: Sequence[int], paths: Sequence[str]) -> None:
    """DataError where a blend draws more samples from a data set than it has."""
    for number, (count, length) in enumerate(zip(blend.counts.tolist(), lengths, strict=True)):
        if count > length:
            raise DataError(
                f"{paths[number]}: the blend draws {count} samples from this data set, number {number}, which has "
                f"{length}; raise --mid-level-dataset-surplus"
            )
