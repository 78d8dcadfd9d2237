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
from megatron_core.datasets.keyed_dataset import KeyedGPTDataset
from megatron_core.datasets.paths import NAMES, Phase, read_paths
from megatron_core.datasets.phases import MixPhase, PhasedDataset
from megatron_core.datasets.split import DEFAULT_SPLIT, parse_split, split_ranges
from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import Tokenizer


@dataclass(frozen=True)
class Splits:
    """The data set of each split, None where it has none; `notes` says what was left out and why."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    notes: tuple[str, ...] = ()


def build_datasets(data: DataConfig, *, seed: int, tokenizer: Tokenizer | None = None) -> Splits:
    """Open the token files that the flags describe, and share them out.

    `data_path` is divided by `split` (969,30,1 if None); otherwise each split has paths of its own. With a
    tokenizer, files that know theirs are checked against it.
    ConfigError: flags that exclude each other. DataError: a file, or too few tokens.
    """
    for sentence in data_problems(RunConfig(data=data)):
        raise ConfigError(sentence)
    opener = _Opener(data, seed, tokenizer)
    paths = read_paths(data)
    if paths.phases:
        splits = opener.divide(paths.phases, parse_split(data.split or DEFAULT_SPLIT))
    else:
        splits = Splits(*(opener.whole(own, name) for own, name in zip(paths.own, NAMES, strict=True)))
    if data.dataloader_type == "cyclic" and splits.train is not None:
        return replace(splits, train=CyclicDataset(splits.train, splits.train.samples_per_epoch, seed))
    return splits


class _Opener:
    """What all the data sets of a run share; a file that is named twice is opened once."""

    def __init__(self, data: DataConfig, seed: int, tokenizer: Tokenizer | None) -> None:
        self._data, self._seed, self._tokenizer = data, seed, tokenizer
        self._eod = _masked_eod(tokenizer) if data.eod_mask_loss else None
        self._open = cache(self._open_file)

    def divide(self, phases: Sequence[Phase], fractions: Sequence[float]) -> Splits:
        """The splits of one `--data-path`, or of the last of several phases, which validation and test belong to."""
        for phase in phases:
            self._open_all(parse_blend(phase.data_path)[1])
        notes: list[str] = []
        blends = [self._shares(phases[-1], fractions, number, notes) for number in range(len(NAMES))]
        train, valid, test = (_blend(*parts_and_weights) for parts_and_weights in blends)
        if len(phases) > 1:
            train = PhasedDataset([self._mix(phase, fractions) for phase in phases])
        return Splits(train, valid, test, notes=tuple(notes))

    def whole(self, paths: Sequence[str], name: str) -> Dataset | None:
        """The data set of a split with paths of its own, where too few tokens are always an error."""
        if not paths:
            return None
        weights, prefixes = parse_blend(paths)
        self._open_all(prefixes)
        return _blend([self._make(prefix, range(len(self._open(prefix))), name) for prefix in prefixes], weights)

    def _shares(
        self, phase: Phase, fractions: Sequence[float], number: int, notes: list[str]
    ) -> tuple[list[KeyedGPTDataset | None], Sequence[float] | None]:
        """The share of split `number` in each file of a phase, and the files' weights."""
        weights, prefixes = parse_blend(phase.data_path)
        if fractions[number] == 0:
            return [], None
        ranges = [split_ranges(fractions, len(self._open(prefix)))[number] for prefix in prefixes]
        shares = zip(prefixes, ranges, strict=True)
        return [self._part(prefix, own, NAMES[number], notes) for prefix, own in shares], weights

    def _mix(self, phase: Phase, fractions: Sequence[float]) -> MixPhase:
        """The training share of a phase."""
        parts, weights = self._shares(phase, fractions, 0, [])
        prefixes = parse_blend(phase.data_path)[1]
        if len(set(prefixes)) < len(prefixes):
            raise ConfigError(
                f"data_phases: a phase names a file twice in {' '.join(phase.data_path)}; add the weights"
            )
        return MixPhase(BlendedDataset(parts, weights), dict(zip(prefixes, parts, strict=True)), phase.samples)

    def _part(self, prefix: str, sequences: range, name: str, notes: list[str]) -> KeyedGPTDataset | None:
        """One file's share of a split, or None and a note.

        Only training cannot go without. The default split gives a thousandth of the sequences to test: a
        small file, as in a first try, has no sample there, and nobody asked for one.
        """
        try:
            return self._make(prefix, sequences, name)
        except DataError as error:
            if name == "train":
                raise
            notes.append(f"left out: {error}")
            return None

    def _make(self, prefix: str, sequences: range, name: str) -> KeyedGPTDataset:
        masked = self._eod is not None
        length = self._data.seq_length
        return KeyedGPTDataset(self._open(prefix), sequences, length, self._seed, name, self._eod, masked)

    def _open_all(self, prefixes: Sequence[str]) -> None:
        """Open files at the same time, which on a network's file system is mostly waiting."""
        with ThreadPoolExecutor(self._data.num_dataset_builder_threads) as threads:
            list(threads.map(self._open, prefixes))

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


def _blend(parts: Sequence[KeyedGPTDataset | None], weights: Sequence[float] | None) -> Dataset | None:
    """One data set from the parts that are there, in the proportions that they have to one another."""
    kept = [part for part in parts if part is not None]
    if len(kept) < 2:
        return kept[0] if kept else None
    if weights is not None:
        weights = [weight for weight, part in zip(weights, parts, strict=True) if part is not None]
    return BlendedDataset(kept, weights)
