"""From the data flags to the data sets of training, validation and test."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megatron_core.datasets.base import Dataset
from megatron_core.datasets.blend import BlendedDataset, parse_blend
from megatron_core.datasets.header import check_tokenizer
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.keyed_dataset import KeyedGPTDataset
from megatron_core.datasets.split import DEFAULT_SPLIT, parse_split, split_ranges
from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import Tokenizer

NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class Splits:
    """The data set of each split, None where it has none; `notes` says what was left out and why."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    notes: tuple[str, ...] = ()


def build_datasets(
    *,
    data_path: Sequence[str] = (),
    train_data_path: Sequence[str] = (),
    valid_data_path: Sequence[str] = (),
    test_data_path: Sequence[str] = (),
    split: str | None = None,
    sequence_length: int,
    seed: int,
    tokenizer: Tokenizer | None = None,
    eod_mask_loss: bool = False,
) -> Splits:
    """Open the token files that the flags of the same names describe, and share them out.

    `data_path` is divided by `split` (969,30,1 if None); otherwise each split has paths of its own. With a
    tokenizer, files that know theirs are checked against it.
    ConfigError: flags that exclude each other. DataError: a file, or too few tokens.
    """
    own_paths = (train_data_path, valid_data_path, test_data_path)
    _check_flags(data_path, own_paths, split)
    eod = _masked_eod(tokenizer) if eod_mask_loss else None
    opener = _Opener(tokenizer, sequence_length, seed, eod)
    if data_path:
        return opener.divide(data_path, parse_split(split or DEFAULT_SPLIT))
    return Splits(*(opener.whole(paths, name) for paths, name in zip(own_paths, NAMES, strict=True)))


def _check_flags(data_path: Sequence[str], own_paths: Sequence[Sequence[str]], split: str | None) -> None:
    given = [f"--{name}-data-path" for name, paths in zip(NAMES, own_paths, strict=True) if paths]
    if data_path and given:
        raise ConfigError(f"--data-path and {' and '.join(given)} exclude each other; give one kind")
    if split is not None and given:
        raise ConfigError(f"--split {split} divides --data-path and has no meaning with {' and '.join(given)}")
    if not data_path and not given:
        raise ConfigError("no data is given; use --data-path PREFIX, --train-data-path PREFIX, or --mock-data")


def _masked_eod(tokenizer: Tokenizer | None) -> int:
    if tokenizer is None or tokenizer.eod is None:
        raise ConfigError("--eod-mask-loss needs a tokenizer with an end-of-document id; see --tokenizer-type")
    return tokenizer.eod


class _Opener:
    """What all the data sets of a run share; a file that is named twice is opened once."""

    def __init__(self, tokenizer: Tokenizer | None, sequence_length: int, seed: int, eod: int | None) -> None:
        self._tokenizer = tokenizer
        self._sequence_length = sequence_length
        self._seed = seed
        self._eod = eod
        self._open = cache(self._open_file)

    def divide(self, paths: Sequence[str], fractions: Sequence[float]) -> Splits:
        """The splits of one `--data-path`."""
        weights, prefixes = parse_blend(paths)
        ranges = [split_ranges(fractions, len(self._open(prefix))) for prefix in prefixes]
        notes: list[str] = []
        splits: list[Dataset | None] = []
        for number, name in enumerate(NAMES):
            if fractions[number] == 0:
                splits.append(None)
                continue
            shares = zip(prefixes, ranges, strict=True)
            parts = [self._part(prefix, own[number], name, notes) for prefix, own in shares]
            splits.append(_blend(parts, weights))
        return Splits(*splits, notes=tuple(notes))

    def whole(self, paths: Sequence[str], name: str) -> Dataset | None:
        """The data set of a split with paths of its own, where too few tokens are always an error."""
        if not paths:
            return None
        weights, prefixes = parse_blend(paths)
        parts = [self._make(prefix, range(len(self._open(prefix))), name) for prefix in prefixes]
        return _blend(parts, weights)

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
        indexed = self._open(prefix)
        masked = self._eod is not None
        return KeyedGPTDataset(indexed, sequences, self._sequence_length, self._seed, name, self._eod, masked)

    def _open_file(self, prefix: str) -> IndexedDataset:
        indexed = IndexedDataset(prefix)
        if self._tokenizer is not None:
            check_tokenizer(prefix, self._tokenizer)
        return indexed


def _blend(parts: Sequence[KeyedGPTDataset | None], weights: Sequence[float] | None) -> Dataset | None:
    """One data set from the parts that are there, in the proportions that they have to one another."""
    kept = [part for part in parts if part is not None]
    if len(kept) < 2:
        return kept[0] if kept else None
    if weights is not None:
        weights = [weight for weight, part in zip(weights, parts, strict=True) if part is not None]
    return BlendedDataset(kept, weights)
