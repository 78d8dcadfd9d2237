"""Builds the data sets of training, validation and test from the data flags."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import numpy as np

from megatron_core.config import DataConfig, RunConfig, TrainingConfig
from megatron_core.config.rules_data import data_problems
from megatron_core.datasets.base import Dataset
from megatron_core.datasets.blend import BlendedDataset, parse_blend
from megatron_core.datasets.header import check_counts, check_tokenizer, check_vocabulary, read_header
from megatron_core.datasets.indexed import IndexedDataset, get_idx_path, in_place_of_pair
from megatron_core.datasets.keyed_dataset import CyclicDataset, KeyedGPTDataset
from megatron_core.datasets.paths import (
    DEFAULT_SPLIT,
    NAMES,
    DataPaths,
    Phase,
    named_paths,
    parse_split,
    read_paths,
    split_ranges,
)
from megatron_core.errors import ConfigError, DataError
from megatron_core.feature import load_hook
from megatron_core.tokenizers import Tokenizer

Share = tuple[IndexedDataset, range]
"""A file and the range of its sequences that belongs to a split."""

D = TypeVar("D")


class BlendOrder(Protocol):
    """An order of samples other than the keyed one, which features add."""

    def __call__(
        self, shares: Sequence[Share], weights: Sequence[float] | None, split_name: str, masked_token: int | None
    ) -> Dataset:
        """The samples of weighted files as one data set; DataError for too few tokens."""
        ...


@dataclass(frozen=True)
class Splits:
    """The data set of each split, None if it has none; `notes` explains omitted ones."""

    train: Dataset | None = None
    valid: Dataset | None = None
    test: Dataset | None = None
    notes: tuple[str, ...] = ()
    named: Mapping[str, Dataset] = field(default_factory=dict)
    """Validation sets that are evaluated alone, by name; `valid` is then None."""

    def map(self, change: Callable[[Dataset], Dataset]) -> "Splits":
        """The splits with ``change`` of each data set of tokens in its place."""
        named = {name: change(dataset) for name, dataset in self.named.items()}
        train, valid, test = (
            None if dataset is None else change(dataset) for dataset in (self.train, self.valid, self.test)
        )
        return replace(self, train=train, valid=valid, test=test, named=named)

    def of(self, split: str) -> dict[str, Dataset]:
        """The data sets of `validation` or `test`, by the names of their losses."""
        if split == "validation" and self.named:
            return {f"validation {name}": dataset for name, dataset in self.named.items()}
        dataset = self.valid if split == "validation" else self.test
        return {} if dataset is None else {split: dataset}


def divide_files(
    data: DataConfig,
    paths: DataPaths,
    undivided: Callable[[Sequence[str], str], Dataset | None],
    divided: Callable[[Phase, Sequence[float]], Sequence[Dataset | None]],
) -> Splits:
    """Build each split by `undivided` from its own paths, or all by `divided` from the last blend and its shares."""
    if paths.phases:
        # Phases share the validation and test data of the last one: losses of all phases stay comparable.
        train, valid, test = divided(paths.phases[-1], parse_split(data.split or DEFAULT_SPLIT))
        return Splits(train, valid, test)
    named_files = named_paths(data, paths)
    train_paths, valid_paths, test_paths = paths.by_split
    named = {name: undivided((path,), "valid") for name, path in named_files.items()}
    return Splits(
        undivided(train_paths, "train"),
        None if named_files else undivided(valid_paths, "valid"),
        undivided(test_paths, "test"),
        named={name: dataset for name, dataset in named.items() if dataset is not None},
    )


def build_datasets(
    data: DataConfig, *, seed: int, tokenizer: Tokenizer | None = None, order: BlendOrder | None = None
) -> Splits:
    """Open the token files in the flags and divide them between the splits.

    `data_path` is divided by `split` (969,30,1 if None); otherwise each split has its own paths. With a tokenizer,
    files with a header are checked against it. `order`: the order of `data_order` unless this is `keyed`. ConfigError:
    flags that exclude each other. DataError: a bad file, or too few tokens.
    """
    if (data.data_order == "keyed") != (order is None):
        raise ConfigError(f"data_order={data.data_order} needs the function of this order; use --data-order keyed")
    # Programs may build data sets without a run, which would have checked the settings.
    # The caller decides whether training data is required.
    for sentence in data_problems(RunConfig(data=data, training=TrainingConfig(skip_train=True))):
        raise ConfigError(sentence)
    builder = DatasetBuilder(data, seed, tokenizer, order)
    paths = read_paths(data)
    splits = divide_files(data, paths, builder.whole, builder.divided)
    if len(paths.phases) > 1:
        splits = replace(splits, train=load_hook(f"{data.phase_hooks}:training_data")(builder, data, paths.phases))
    splits = replace(splits, notes=tuple(builder.notes))
    if data.dataloader_type == "cyclic" and splits.train is not None:
        once: Any = splits.train
        return replace(splits, train=CyclicDataset(once, once.samples_per_epoch, seed))
    return splits


class DatasetBuilder:
    """Builds the data sets of a run; a file that is named several times is opened once."""

    def __init__(self, data: DataConfig, seed: int, tokenizer: Tokenizer | None, order: BlendOrder | None) -> None:
        self._data = data
        self._seed = seed
        self._tokenizer = tokenizer
        self._order = order
        self._eod = _masked_eod(tokenizer) if data.eod_mask_loss else None
        self._open = cache(self._open_file)
        self.notes: list[str] = []

    def whole(self, paths: Sequence[str], name: str) -> Dataset | None:
        """The data set of a split with its own paths, for which too few tokens are always an error."""
        if not paths:
            return None
        weights, prefixes = parse_blend(paths)
        shares = [(file, range(len(file))) for file in self.opened(prefixes)]
        # As in Megatron, the weight of a single file is ignored.
        return self._blend(shares, weights if len(shares) > 1 else None, name, lenient=False)

    def divided(self, phase: Phase, fractions: Sequence[float]) -> list[Dataset | None]:
        """The splits of one `--data-path`.

        Only training data is required. The default split gives a thousandth of the sequences to test, which is less
        than one sample for a small file; the user did not ask for it, so this is not an error.
        """
        weights, prefixes = parse_blend(phase.data_path)
        files = self.opened(prefixes)
        splits: list[Dataset | None] = []
        for number, name in enumerate(NAMES):
            shares = [(file, split_ranges(fractions, len(file))[number]) for file in files]
            has_share = fractions[number] > 0
            splits.append(self._blend(shares, weights, name, lenient=name != "train") if has_share else None)
        return splits

    def _blend(
        self, shares: Sequence[Share], weights: Sequence[float] | None, name: str, *, lenient: bool
    ) -> Dataset | None:
        """One data set from weighted files; None if all are omitted. A `BlendOrder` uses either all files or none."""
        if self._order is not None:
            return self._or_note(partial(self._order, shares, weights, name, self._eod), lenient)
        datasets = [self._or_note(partial(self.keyed, share, name), lenient) for share in shares]
        usable = [dataset for dataset in datasets if dataset is not None]
        if len(usable) < 2:
            return usable[0] if usable else None
        if weights is not None:
            weights = [weight for weight, dataset in zip(weights, datasets, strict=True) if dataset is not None]
        return BlendedDataset(usable, weights)

    def keyed(self, share: Share, name: str) -> KeyedGPTDataset:
        """The part of a file in keyed order, for the split ``name``."""
        return KeyedGPTDataset(*share, self._data.seq_length, self._seed, name, self._eod)

    def _or_note(self, build: Callable[[], D], lenient: bool) -> D | None:
        """Call `build`; if there are too few tokens and `lenient`, add a note and return None."""
        try:
            return build()
        except DataError as error:
            if not lenient:
                raise
            self.notes.append(f"omitted: {error}")
            return None

    def opened(self, prefixes: Sequence[str]) -> list[IndexedDataset]:
        """Open files in parallel, because opening on a network file system is mostly waiting."""
        with ThreadPoolExecutor(self._data.num_dataset_builder_threads) as threads:
            return list(threads.map(self._open, prefixes))

    def _open_file(self, prefix: str) -> IndexedDataset:
        in_parts = in_place_of_pair(prefix)
        indexed = IndexedDataset(prefix) if in_parts is None else in_parts
        if (dtype := np.dtype(indexed.dtype)).kind == "f":
            raise DataError(
                f"{get_idx_path(prefix)} has the dtype {dtype.name}, but token ids must be integers; copy both "
                "files again, or prepare the data again with megatron-preprocess"
            )
        check_counts(read_header(prefix), prefix, indexed.num_documents, indexed.num_tokens)
        if self._tokenizer is not None:
            check_tokenizer(prefix, self._tokenizer)
        elif self._data.vocab_size is not None:
            check_vocabulary(prefix, self._data.vocab_size)
        return indexed


def _masked_eod(tokenizer: Tokenizer | None) -> int:
    if tokenizer is None or tokenizer.eod is None:
        raise ConfigError("--eod-mask-loss needs a tokenizer with an end-of-document id; see --tokenizer-type")
    return tokenizer.eod
