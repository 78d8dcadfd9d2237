"""The data of a run: data sets, records of the data files, and the interface of features that change them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_core.checkpoint.reader import note
from megatron_core.config import RunConfig
from megatron_core.datasets import MockDataset, Splits, build_datasets
from megatron_core.datasets.base import WholeRound
from megatron_core.datasets.sources import FileContent, describe_changes, record_sources, token_file_content
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.feature import load_hook, used_features
from megatron_core.parallel import World
from megatron_core.parallel.texts import broadcast_from_rank, raise_on_all_ranks
from megatron_core.tokenizers import Tokenizer
from megatron_core.training.state import TrainState

DatasetsProvider = Callable[[RunConfig, Tokenizer | None], Splits]
"""A user-defined function that builds the data sets: (settings, tokenizer or None) -> splits."""


def make_splits(
    config: RunConfig,
    data_parallel_size: int,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    provider: DatasetsProvider | None = None,
) -> Splits:
    """Build the training, validation and test data sets; with ``dataloader_type=external``, by ``provider``.

    Errors: ``ConfigError`` if only one of the two is given.
    """
    loader = config.data.dataloader_type
    if (loader == "external") != (provider is not None):
        raise ConfigError(
            f"dataloader_type={loader} and {'no' if provider is None else 'a'} datasets_provider: "
            "external data sets come from a script of yours that calls megatron_core.training.pretrain(config, world, "
            "datasets_provider)"
        )
    request = DataRequest(config, tokenizer, vocab_size, data_parallel_size)
    feature_parts = data_parts(config)
    splits = provider(config, tokenizer) if provider is not None else _build(feature_parts, request)
    for feature_part in feature_parts:
        splits = feature_part.change(splits, request)
    return for_evaluation(splits, config)


def _build(feature_parts: "Sequence[DataPart]", request: "DataRequest") -> Splits:
    """The data sets that a feature builds, else mock data or token files in keyed order."""
    # The first one builds: rules refuse settings with which two features would.
    for feature_part in feature_parts:
        if (splits := feature_part.build(request)) is not None:
            return splits
    data = request.config.data
    seed = request.config.training.seed
    if data.mock_data:
        train, valid, test = (MockDataset(request.vocab_size, data.seq_length, seed + offset) for offset in range(3))
        return Splits(train, valid, test)
    return build_datasets(data, seed=seed, tokenizer=request.tokenizer)


def for_evaluation(splits: Splits, config: RunConfig) -> Splits:
    """With ``full_validation``, restrict the evaluated data sets to one round."""
    if not config.data.full_validation:
        return splits
    # Training is not restricted: its order has no end.
    return replace(replace(splits, train=None).map(WholeRound), train=splits.train)


def compare_data(config: RunConfig, state: TrainState, world: World) -> list[dict[str, Any]]:
    """Records of the files that this run reads; empty without training.

    Rank 0 reads the files and prints their changes since the checkpoint of ``state``.

    Raises ``CheckpointError`` on all ranks if rank 0 cannot read a file.
    """
    if config.training.skip_train:
        return []
    text = ""
    problem = ""
    # One rank reads counts and hashes: all ranks have the same files, and many readers would load the file system.
    if world.rank == 0:
        try:
            text = json.dumps(record_sources(config.data, file_reader(config)))
        except (OSError, MegatronError) as error:
            problem = f"the data cannot be compared with the files that the checkpoint records: {error}"
    raise_on_all_ranks(problem, world.device)
    records = json.loads(broadcast_from_rank(0, text, world.device))
    for sentence in describe_changes(state.data, records, state.consumed_samples) if state.data and records else ():
        note(sentence)
    return records


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
    return [load_hook(feature.data_part)() for feature in used_features(config) if feature.data_part is not None]


def file_reader(config: RunConfig) -> Callable[[str], FileContent]:
    """The function that reads counts and hashes of a data file; without a feature's, that of token files."""
    readers = (feature.file_content for feature in data_parts(config) if feature.file_content is not None)
    return next(readers, token_file_content)
