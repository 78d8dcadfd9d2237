"""From the data flags to the data sets of training, validation and test."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

from megatron_core.config import DataConfig, RunConfig
from megatron_core.config.rules_data import data_problems
from megatron_core.datasets.base import Dataset
from megatron_core.datasets.blend import BlendedDataset, parse_blend
from megatron_core.datasets.cyclic import CyclicDataset
from megatron_core.datasets.header import check_tokenizer, check_vocabulary
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.orders import KeyedOrder, MegatronOrder, Order, Share, Wanted
from megatron_core.datasets.paths import NAMES, Phase, read_paths
from megatron_core.datasets.phases import MixPhase, PhasedDataset
from megatron_core.datasets.split import DEFAULT_SPLIT, parse_split, split_ranges
from megatron_core.errors import ConfigError
from megatron_core.tokenizers import Tokenizer


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
    for sentence in data_problems(RunConfig(data=data)):
        raise ConfigError(sentence)
    eod = _masked_eod(tokenizer) if data.eod_mask_loss else None
    keyed = KeyedOrder(data, seed, eod)
    order = MegatronOrder(data, seed, eod, wanted or {}) if data.data_order == "megatron" else keyed
    files, paths = _Files(data, tokenizer), read_paths(data)
    if not paths.phases:
        splits = Splits(*(_whole(files, order, own, name) for own, name in zip(paths.own, NAMES, strict=True)))
    else:
        fractions = parse_split(data.split or DEFAULT_SPLIT)
        splits = _divided(files, order, paths.phases[-1], fractions)
        if len(paths.phases) > 1:
            mixes = [_mix(files, keyed, phase, fractions) for phase in paths.phases]
            splits = replace(splits, train=PhasedDataset(mixes))
    if data.dataloader_type == "cyclic" and splits.train is not None:
        return replace(splits, train=CyclicDataset(splits.train, splits.train.samples_per_epoch, seed))
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
    in a first try, has no sample there, and nobody asked for one.
    """
    weights, prefixes = parse_blend(phase.data_path)
    opened = files.open(prefixes)
    notes: list[str] = []
    splits: list[Dataset | None] = []
    for number, name in enumerate(NAMES):
        shares = [Share(indexed, split_ranges(fractions, len(indexed))[number]) for indexed in opened]
        lenient = None if name == "train" else notes
        splits.append(order.blend(shares, weights, name, lenient) if fractions[number] else None)
    return Splits(*splits, notes=tuple(notes))


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
