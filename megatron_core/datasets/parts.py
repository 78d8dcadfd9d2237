"""Interface of features to the data of a run: kinds of data, orders of samples, and transformations of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_core.config import RunConfig
from megatron_core.datasets.build import Splits
from megatron_core.datasets.sources import FileContent, token_file_content
from megatron_core.feature import load_hook, used_features
from megatron_core.tokenizers import Tokenizer


@dataclass(frozen=True)
class DataRequest:
    """The data sets that a run needs."""

    config: RunConfig
    tokenizer: Tokenizer | None
    vocab_size: int
    data_parallel_size: int


class DataPart:
    """Base class of ``Feature.data_part``; override the methods that you need.

    Every rank calls them with equal arguments, without communication.
    """

    file_content: Callable[[str], FileContent] | None = None
    """Reads counts and hashes of a data file; None: the feature does not add a kind of file."""

    def build(self, request: DataRequest) -> Splits | None:
        """Build the data sets of the run; None: the feature does not add a kind of data or an order of samples."""
        return None

    def change(self, splits: Splits, request: DataRequest) -> Splits:
        """Return the data sets that the run reads instead of ``splits``."""
        return splits


def data_parts(config: RunConfig) -> Sequence[DataPart]:
    """The data parts of the features that the run uses."""
    hooks = [feature.data_part for feature in used_features(config) if feature.data_part is not None]
    return [load_hook(hook)() for hook in hooks]


def file_reader(config: RunConfig) -> Callable[[str], FileContent]:
    """The function that reads counts and hashes of a data file; without a feature's, that of token files."""
    readers = (feature.file_content for feature in data_parts(config) if feature.file_content is not None)
    return next(readers, token_file_content)
