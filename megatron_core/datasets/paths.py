"""Parses the data flags into prefixes, weights, and the fractions of train, validation and test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megatron_core.config import DataConfig
from megatron_core.datasets.base import short_names
from megatron_core.errors import ConfigError, quoted
from megatron_core.feature import load_hook
from megatron_core.text_file import parse_json, read_text

NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class Phase:
    """A blend from which training reads `samples` samples; None: all remaining ones."""

    data_path: tuple[str, ...]
    samples: int | None = None


@dataclass(frozen=True)
class DataPaths:
    """Either phases, whose files are divided by `--split` (one phase: `--data-path`), or separate files per split."""

    phases: tuple[Phase, ...] = ()
    by_split: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())


def read_paths(data: DataConfig) -> DataPaths:
    """Read the data flags, including files with flags; ConfigError: such a file is missing or malformed."""
    if data.phase_hooks:
        return DataPaths(phases=load_hook(f"{data.phase_hooks}:read_phases")(data))
    if data.data_args_path is not None:
        return DataPaths(phases=(Phase(tuple(text_of("data_args_path", data.data_args_path).split())),))
    if data.per_split_data_args_path is not None:
        return DataPaths(by_split=_read_own(data.per_split_data_args_path))
    if data.data_path:
        return DataPaths(phases=(Phase(data.data_path),))
    return DataPaths(by_split=(data.train_data_path, data.valid_data_path, data.test_data_path))


def named_paths(data: DataConfig, paths: DataPaths) -> dict[str, str]:
    """The validation files of `--multiple-validation-sets` by name; empty without it."""
    if not data.multiple_validation_sets:
        return {}
    files = paths.by_split[1]
    names = data.validation_set_names or short_names(files)
    if len(set(names)) < len(names) or len(names) != len(files):
        raise ConfigError(
            f"{len(names)} names of validation sets ({', '.join(names)}) for {len(files)} files; give "
            "--validation-set-names with a different name for each"
        )
    return dict(zip(names, files, strict=True))


def text_of(setting: str, path: str) -> str:
    """The text of a file that a setting names."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}={path} cannot be read: {error}") from None


def _read_own(path: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The lists under train, valid and test; a string is split at spaces."""
    expected = 'expected an object such as {"train": ["0.7", "a", "0.3", "b"], "valid": ["c"], "test": null}'
    text = text_of("per_split_data_args_path", path)
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"per_split_data_args_path={path} is not JSON ({error}); {expected}") from None
    if not isinstance(content, dict) or not set(content) <= set(NAMES) or not content.get("train"):
        keys = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"per_split_data_args_path={path} contains {keys or 'nothing'}; {expected}")
    train, valid, test = (words_of(f"per_split_data_args_path={path}: {name}", content.get(name)) for name in NAMES)
    return train, valid, test


def words_of(where: str, value: Any) -> tuple[str, ...]:
    """A list of weights and prefixes, as words of a command line."""
    words: Sequence[Any] = value.split() if isinstance(value, str) else value
    words = [] if words is None else words
    is_list = isinstance(words, list) and not any(isinstance(word, bool) for word in words)
    if not is_list or not all(isinstance(word, str | int | float) for word in words):
        raise ConfigError(
            f"{where} is {quoted(value)}; expected a list such as [0.7, a_text_document, 0.3, b_text_document]"
        )
    return tuple(str(word) for word in words)


DEFAULT_SPLIT = "969,30,1"


def parse_split(split: str) -> tuple[float, float, float]:
    """The three fractions of `--split`, normalised to a sum of 1; omitted ones are 0."""
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--split {split} has a part that is not a number; give three, such as {DEFAULT_SPLIT}"
        ) from error
    if len(shares) > 3:
        raise ConfigError(
            f"--split {split} has {len(shares)} parts; give at most three, for train, validation and test"
        )
    if not all(math.isfinite(share) and share >= 0 for share in shares) or sum(shares) == 0:
        raise ConfigError(f"--split {split} needs numbers >= 0, at least one of them > 0, such as {DEFAULT_SPLIT}")
    shares += [0.0] * (3 - len(shares))
    train, valid, test = (share / sum(shares) for share in shares)
    return train, valid, test


def split_ranges(split: Sequence[float], num_sequences: int) -> tuple[range, ...]:
    """The range of sequences of each part: contiguous, with borders at round(cumulative fraction * sequences)."""
    borders = [round(fraction * num_sequences) for fraction in accumulate(split, initial=0.0)]
    return tuple(range(start, stop) for start, stop in pairwise(borders))
