"""What training asks of a data set."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypedDict

import numpy as np


class Sample(TypedDict):
    """One training sequence of L tokens.

    tokens: int64 [L]. labels: int64 [L], the token that follows each.
    loss_mask: float32 [L], 1 where the label counts.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray


class PackedSample(Sample):
    """A sample whose documents the data set itself has packed.

    position_ids: int64 [L], the positions in their documents. document_lengths: int64 [d], their sum L.
    """

    position_ids: np.ndarray
    document_lengths: np.ndarray


class Dataset(Protocol):
    """Samples in an order: item i is a pure function of i, for every i >= 0 or until a DataError names the end."""

    sequence_length: int

    def __getitem__(self, index: int) -> Sample:
        """The sample at a position of the endless order."""
        ...


def sources_of(dataset: Dataset | None) -> tuple[str, ...]:
    """Names of what a blend reads from, in the order of the numbers that its `source_of(index)` gives; else none."""
    return getattr(dataset, "sources", ())


def short_names(prefixes: Sequence[str]) -> tuple[str, ...]:
    """File names without their folders, if they differ."""
    names = tuple(Path(prefix).name for prefix in prefixes)
    return names if len(set(names)) == len(names) else tuple(prefixes)
