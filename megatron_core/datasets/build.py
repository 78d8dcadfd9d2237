"""From the data flags to the data sets of training, validation and test."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from megatron_core.config import DataConfig, RunConfig, TrainingConfig
from megatron_core.config.rules_data import data_problems
from megatron_core.datasets.base import Dataset
from megatron_core.datasets.blend import BlendedDataset, MixPhase, PhasedDataset, parse_blend
from megatron_core.datasets.header import check_tokenizer, check_vocabulary
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.keyed_dataset import CyclicDataset, KeyedGPTDataset
from megatron_core.datasets.megatron_order import build_megatron_order
from megatron_core.datasets.paths import DEFAULT_SPLIT, NAMES, Phase, parse_split, read_paths, split_ranges
from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import Tokenizer

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


@dataclass(frozen=True)
class Splits:
    """The data set of each split, None where it has none; `notes` says what was left out and why."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    notes: tuple[str, ...] = ()


def build_datasets(
    data: DataConfig, *, seed: int, tokenizer: Tokenizer | None = None, wanted: Wanted | None = None
) -> Splits:
    """Open the token files that the flags describe, and share them out.

    `data_path` is divided by `split` (969,30,1 if None); otherwise each split has paths of its own. With a
    tokenizer, files that know theirs are checked against it. `wanted` samples are what Megatron's order depends on;
    None: one epoch.
    ConfigError: flags that exclude each other. DataError: a file, or too few tokens.
    """
    # Whether there must be training data is for the caller to know.
    for sentence in data_problems(RunConfig(data=data, training=TrainingConfig(skip_train=True))):
        raise ConfigError(sentence)
    eod = _masked_eod(tokenizer) if data.eod_mask_loss else None
    keyed = KeyedOrder(data, seed, eod)
    order = MegatronOrder(data, seed, eod, wanted or {}) if data.data_order == "megatron" else keyed
    files, paths = _Files(data, tokenizer), read_paths(data)
    if not paths.phases:
        train, valid, test = (_whole(files, order, own, name) for own, name in zip(paths.own, NAMES, strict=True))
        splits = Splits(train, valid, test)
    else:
        fractions = parse_split(data.split or DEFAULT_SPLIT)
        splits = _divided(files, order, paths.phases[-1], fractions)
        if len(paths.phases) > 1:
            mixes = [_mix(files, keyed, phase, fractions) for phase in paths.phases]
            splits = replace(splits, train=PhasedDataset(mixes))
    if data.dataloader_type == "cyclic" and splits.train is not None:
        once: Any = splits.train
        return replace(splits, train=CyclicDataset(once, once.samples_per_epoch, seed))
    return splits


def _whole(files: "_Files", order: Order, paths: Sequence[str], name: str) -> Dataset | None:
    """The data set of a split with paths of its own, where too few tokens are always an error."""
    if not paths:
        return None
    weights, prefixes = parse_blend(paths)
    shares = [Share(indexed, range(len(indexed))) for indexed in files.open(prefixes)]
    # As in Megatron: the weight of a single file means nothing here.
    return order.blend(shares, weights if len(shares) > 1 else None, name, None)


def _divided(files: "_Files", order: Order, phase: Phase, fractions: Sequence[float]) -> Splits:
    """The splits of one `--data-path`.

    Only training cannot go without. The default split gives a thousandth of the sequences to test: a small file, as
    in a first try, has no sample there, and none was asked for.
    """
    weights, prefixes = parse_blend(phase.data_path)
    opened = files.open(prefixes)
    notes: list[str] = []
    splits: list[Dataset | None] = []
    for number, name in enumerate(NAMES):
        shares = [Share(indexed, split_ranges(fractions, len(indexed))[number]) for indexed in opened]
        lenient = None if name == "train" else notes
        splits.append(order.blend(shares, weights, name, lenient) if fractions[number] else None)
    train, valid, test = splits
    return Splits(train, valid, test, tuple(notes))


def _mix(files: "_Files", order: KeyedOrder, phase: Phase, fractions: Sequence[float]) -> MixPhase:
    """The training share of a phase."""
    weights, prefixes = parse_blend(phase.data_path)
    if len(set(prefixes)) < len(prefixes):
        raise ConfigError(f"data_phases: {' '.join(phase.data_path)} names a file twice; add up its weights")
    opened = files.open(prefixes)
    parts = [order.part(Share(file, split_ranges(fractions, len(file))[0]), "train") for file in opened]
    return MixPhase(BlendedDataset(parts, weights), dict(zip(prefixes, parts, strict=True)), phase.samples)


class _Files:
    """The token files of a run; one that is named twice is opened once."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer | None) -> None:
        self._data, self._tokenizer = data, tokenizer
        self._open = cache(self._open_file)

    def open(self, prefixes: Sequence[str]) -> list[IndexedDataset]:
        """Files opened at the same time, which on a network's file system is mostly waiting."""
        with ThreadPoolExecutor(self._data.num_dataset_builder_threads) as threads:
            return list(threads.map(self._open, prefixes))

    def _open_file(self, prefix: str) -> IndexedDataset:
        indexed = IndexedDataset(prefix)
        if self._tokenizer is not None:
            check_tokenizer(prefix, self._tokenizer)
        elif self._data.vocab_size is not None:
            check_vocabulary(prefix, self._data.vocab_size)
        return indexed


def _masked_eod(tokenizer: Tokenizer | None) -> int:
    if tokenizer is None or tokenizer.eod is None:
        raise ConfigError("--eod-mask-loss needs a tokenizer with an end-of-document id; see --tokenizer-type")
    return tokenizer.eod
