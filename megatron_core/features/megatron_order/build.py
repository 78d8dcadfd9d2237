"""Data sets in Megatron's order, for one file and for blends: the same samples as Megatron-LM for the same seed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_core.datasets.base import Dataset, Sample, short_names
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.megatron_order.blend_index import (
    BlendIndex,
    build_blend_index,
    build_exhaustive_blend_index,
    normalize,
    samples_per_dataset,
)
from megatron_core.features.megatron_order.cache import IndexCache
from megatron_core.features.megatron_order.order import OrderOptions, SampleOrder, cached_order

# Padding of a short sample if the vocabulary has no padding id: not a token id.
NO_PAD = -1


def read_sample(indexed: Any, order: SampleOrder, number: int, length: int, extra_tokens: int, pad: int) -> np.ndarray:
    """The L + x tokens of sample `number` of the sample index, padded with `pad` at the end: int64 [L + x].

    They start at row `number` and end x tokens after row `number + 1`; consecutive samples share x tokens.
    """
    first, offset = (int(value) for value in order.sample_index[number])
    final, stop = (int(value) for value in order.sample_index[number + 1])
    tokens = np.full(length + extra_tokens, pad, dtype=np.int64)
    filled = 0
    for entry in range(first, final + 1):
        document = int(order.document_index[entry])
        end = stop + extra_tokens if entry == final else int(indexed.sequence_lengths[document])
        count = end - offset
        if count > 0:
            tokens[filled : filled + count] = indexed.get(document, offset, count)
        filled += count
        offset = 0
    return tokens


def divide(text: np.ndarray, extra_tokens: int, pad: int, masked_token: int | None) -> Sample:
    """Split a text into tokens, labels and the mask of labels that count.

    Labels are the text from its second token on; without an extra token, the last label is padding. The mask is 0 where
    the label is `pad` or the token is `masked_token`. Padding is replaced by id 0, which every embedding has.
    """
    if extra_tokens:
        tokens = text[:-1].copy()
        labels = text[1:].copy()
    else:
        tokens = text.copy()
        labels = np.append(text[1:], pad)
    mask = np.ones(len(tokens), dtype=np.float32)
    mask[labels == pad] = 0.0
    if masked_token is not None:
        mask[tokens == masked_token] = 0.0
    tokens[tokens == pad] = 0
    labels[labels == pad] = 0
    return Sample(tokens=tokens, labels=labels, loss_mask=mask)


# Settings to change so that a split has more samples.
MORE = {
    "train": "--train-iters or --train-samples",
    "valid": "--train-iters or --eval-iters, or lower --eval-interval",
    "test": "--eval-iters",
}


class Sequences(Protocol):
    """The part of ``IndexedDataset`` that is read."""

    path_prefix: str
    sequence_lengths: np.ndarray

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of a sequence."""


@dataclass(eq=False)
class MegatronOrderedDataset:
    """The samples of one file in Megatron's order: item i is sample shuffle_index[i] of the sample index.

    The order is finite. DataError: an item beyond its end.
    """

    indexed: Sequences
    order: SampleOrder
    options: OrderOptions
    split_name: str = "train"
    pad: int = NO_PAD
    masked_token: int | None = None

    def __post_init__(self) -> None:
        self.sequence_length = self.options.sequence_length
        self.source = self.indexed.path_prefix

    def __len__(self) -> int:
        return len(self.order)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples per epoch."""
        return len(self)

    def __getitem__(self, index: int) -> Sample:
        """Item `index` of [0, len)."""
        check_place(index, len(self), self.split_name)
        number = int(self.order.shuffle_index[index])
        length = self.sequence_length
        extra = self.options.extra_tokens
        text = read_sample(self.indexed, self.order, number, length, extra, self.pad)
        return divide(text, extra, self.pad, self.masked_token)


class MegatronOrderedBlend:
    """A blend in Megatron's order: item i is item dataset_sample_index[i] of data set dataset_index[i].

    The order is finite. DataError: an item beyond its end.
    """

    def __init__(
        self, datasets: Sequence[MegatronOrderedDataset], blend: BlendIndex, split_name: str = "train"
    ) -> None:
        self.sequence_length = datasets[0].sequence_length
        self.dataset_index = blend.dataset_index
        self.dataset_sample_index = blend.dataset_sample_index
        self.sources = short_names([dataset.source for dataset in datasets])
        self._datasets = tuple(datasets)
        self._split_name = split_name

    def __len__(self) -> int:
        return len(self.dataset_index)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples per epoch."""
        return len(self)

    def __getitem__(self, index: int) -> Sample:
        """Item `index` of [0, len)."""
        check_place(index, len(self), self._split_name)
        return self._datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]

    def source_of(self, index: int) -> int:
        """Number of the data set of a sample."""
        return int(self.dataset_index[index])


def check_place(index: int, length: int, split_name: str) -> None:
    """DataError, with the setting to change, for an item beyond the end; IndexError for a negative index."""
    if index < 0:
        raise IndexError(f"sample {index}: the order starts at 0")
    if index >= length:
        raise DataError(
            f"sample {index} of the {split_name} data, of which --data-order megatron has ordered {length}: "
            f"Megatron's order is finite and depends on the number of samples requested; raise {MORE[split_name]} "
            "from the start of the run (which changes the order), give several files weights (without them each is "
            "read once), or use --data-order keyed, which is endless"
        )


SURPLUS = 0.005


def build_megatron_order(
    indexed: Sequence[Sequences],
    ranges: Sequence[range],
    weights: Sequence[float] | None,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    split_name: str = "train",
    *,
    cache: Path | str | None = None,
    masked_token: int | None = None,
    pad: int = NO_PAD,
    drop_last_partial: bool = True,
    surplus: float = SURPLUS,
    threads: int = 1,
) -> Dataset:
    """The sequences `ranges[d]` of each file, in Megatron-LM's order.

    - One file without weights: `num_samples` are requested from it (None: one epoch).
    - Weights, even a single one: of N samples, ceil(ceil(N w) (1 + surplus)) are requested from each file, then
      blended.
    - Several files without weights: each gives one epoch; they are blended by size into at most N samples, or all of
      them if `num_samples` is None.

    cache: a folder for the indices; without one nothing is written. threads: number of files processed in parallel.
    masked_token: the mask is 0 where the input token is this one.
    pad: the id that pads a short last sample (`drop_last_partial=False`), whose labels do not count.
    ConfigError: weights without a number of samples, or not one per file. DataError: a file without a sample.
    """
    if weights is not None and (num_samples is None or len(weights) != len(indexed)):
        raise ConfigError(
            f"a blend of {len(indexed)} data sets with {len(weights)} weights and {num_samples} samples; "
            "give one weight per data set, and a number of samples"
        )
    store = IndexCache(cache)
    wanted = _asked(len(indexed), weights, num_samples, surplus)

    def build(number: int) -> MegatronOrderedDataset:
        file = indexed[number]
        sequences = ranges[number]
        options = OrderOptions(sequence_length, wanted[number], seed, drop_last_partial=drop_last_partial)
        check_tokens(file.path_prefix, split_name, file.sequence_lengths[sequences.start : sequences.stop], options)
        name = f"GPTDataset-{split_name}"
        order = cached_order(store, name, file.sequence_lengths, np.arange(sequences.start, sequences.stop), options)
        return MegatronOrderedDataset(file, order, options, split_name, pad, masked_token)

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        datasets = list(pool.map(build, range(len(indexed))))
    if len(datasets) == 1 and weights is None:
        return datasets[0]
    lengths = [len(dataset) for dataset in datasets]
    size = blend_size(lengths, weights, num_samples)
    # Megatron-LM normalises twice, in the builder and in the blend; the second time may change the last bit.
    shares = lengths if weights is None else normalize(weights)
    blend = cached_blend(store, f"BlendedDataset-{split_name}", shares, size)
    check_blend(blend, lengths, [file.path_prefix for file in indexed])
    return MegatronOrderedBlend(datasets, blend, split_name)


def _asked(number: int, weights: Sequence[float] | None, num_samples: int | None, surplus: float) -> list[int | None]:
    """Number of samples requested from a data set; None for one epoch."""
    if weights is not None:
        return list(samples_per_dataset(num_samples or 0, normalize(weights), surplus))
    return [num_samples] if number == 1 else [None] * number


def blend_size(lengths: Sequence[int], weights: Sequence[float] | None, num_samples: int | None) -> int | None:
    """The length of a blend of data sets of these lengths; None if it uses all of their samples."""
    if num_samples is None:
        return None
    if weights is None:
        return min(num_samples, sum(lengths))
    return sum(samples_per_dataset(num_samples, normalize(weights)))


def cached_blend(cache: IndexCache, name: str, weights: Sequence[float], size: int | None) -> BlendIndex:
    """The order of a blend, through the cache; if size is None, `weights` are lengths and all samples are used."""
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
    """DataError if a file does not have a sample, or a token, for a split."""
    tokens = int(lengths.sum(dtype=np.int64))
    needed = 1 if options.num_samples is not None else options.sequence_length + options.extra_tokens
    if options.num_samples is None and not options.drop_last_partial:
        needed = 1 + options.extra_tokens
    if tokens < needed:
        raise DataError(
            f"{path}: the {split_name} split has {tokens} tokens in {len(lengths)} sequences, but one sample needs "
            f"{needed} (--seq-length {options.sequence_length}); prepare more text, change --split, or lower "
            "--seq-length"
        )


def check_blend(blend: BlendIndex, lengths: Sequence[int], paths: Sequence[str]) -> None:
    """DataError if a blend draws more samples from a data set than it has."""
    for number, (count, length) in enumerate(zip(blend.counts.tolist(), lengths, strict=True)):
        if count > length:
            raise DataError(
                f"{paths[number]}: the blend draws {count} samples from this data set, number {number}, which has "
                f"only {length}; raise --mid-level-dataset-surplus"
            )
