"""The interface between training and data sets, and the data of an evaluation that reads a whole set."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np

from megatron_core.errors import ConfigError, DataError


class Sample(TypedDict):
    """One training sequence of L tokens.

    tokens: int64 [L]. labels: int64 [L], the next token of each. loss_mask: float32 [L], 1 where the label counts.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray


class PackedSample(Sample):
    """A sample that contains packed documents.

    position_ids: int64 [L], positions within the documents. document_lengths: int64 [d], whose sum is L.
    """

    position_ids: np.ndarray
    document_lengths: np.ndarray


class Dataset(Protocol):
    """Samples in an order: item i is a pure function of i, for all i >= 0 or until a DataError at the end."""

    sequence_length: int

    def __getitem__(self, index: int) -> Sample:
        """The sample at a position of the endless order."""
        ...


def sources_of(dataset: Dataset | None) -> tuple[str, ...]:
    """Names of the data sets of a blend, indexed by its `source_of(index)`; empty without a blend."""
    return getattr(dataset, "sources", ())


def short_names(prefixes: Sequence[str]) -> tuple[str, ...]:
    """File names without their folders, if they are distinct."""
    names = tuple(Path(prefix).name for prefix in prefixes)
    return names if len(set(names)) == len(names) else tuple(prefixes)


def checked_text(value: object, name: str) -> str:
    """``value`` of the key ``name`` of a data file; DataError unless it is a string."""
    if not isinstance(value, str):
        actual = "null or missing" if value is None else f"of type {type(value).__name__}"
        raise DataError(f"{name} must be a string, not {actual}: only text is supported")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{name} has half of a surrogate pair, which is not valid Unicode") from None
    return value


class WholeRound:
    """The samples of ``dataset`` once; after the last one, samples without counted tokens fill the last batch.

    Errors: ``ConfigError`` for a blend, and for a data set without an end.
    """

    def __init__(self, dataset: Dataset) -> None:
        # A blend has no end: it draws from each file by its weight, so no number of samples has each one once.
        count = None if sources_of(dataset) else getattr(dataset, "samples_per_epoch", None)
        if count is None:
            raise ConfigError(
                f"full_validation=True needs one file with an end for each set, not a {type(dataset).__name__}; add "
                "--multiple-validation-sets, or remove it and give --eval-iters"
            )
        self.sequence_length = dataset.sequence_length
        self._dataset = dataset
        self._count = int(count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index % self._count]
        return sample if index < self._count else {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}
