"""The data of a run: vocabulary, data sets and their batches on this rank."""

from __future__ import annotations

from collections.abc import Callable

from megatron_core.config import RunConfig
from megatron_core.datasets import Dataset, MockDataset, Splits, build_datasets
from megatron_core.datasets.loader import BatchLoader
from megatron_core.errors import ConfigError
from megatron_core.parallel import ParallelGroups, World
from megatron_core.tokenizers import Tokenizer

DatasetsProvider = Callable[[RunConfig, Tokenizer | None], Splits]
"""A function of your own that makes the data sets: the settings and the tokenizer, if one is named, to the splits."""


def make_loader(
    config: RunConfig, groups: ParallelGroups, world: World, dataset: Dataset, vocab_size: int
) -> BatchLoader:
    """A data-parallel rank's batches of ``dataset``."""
    return BatchLoader(
        dataset,
        config.training.micro_batch_size,
        groups.index("dp"),
        groups.size("dp"),
        vocab_size,
        num_workers=config.data.num_workers,
        pin_memory=world.device.type == "cuda",
    )


def vocabulary_size(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """The true size of the vocabulary, without padding: ``vocab_size`` if given, else the tokenizer's."""
    size = config.data.vocab_size or (tokenizer.vocab_size if tokenizer is not None else None)
    if size is None:
        raise ConfigError("the vocabulary's size is unknown; give --tokenizer-type or --vocab-size")
    return size


def make_splits(
    config: RunConfig, tokenizer: Tokenizer | None, vocab_size: int, provider: DatasetsProvider | None = None
) -> Splits:
    """The data sets of training, validation and test; those of ``provider`` with ``dataloader_type=external``."""
    data, seed = config.data, config.training.seed
    external = data.dataloader_type == "external"
    if external != (provider is not None):
        raise ConfigError(
            f"dataloader_type={data.dataloader_type} and {'no' if provider is None else 'a'} datasets_provider: "
            "external data sets come from a script of yours that calls megatron_core.training.pretrain(config, world, "
            "datasets_provider)"
        )
    if provider is not None:
        return provider(config, tokenizer)
    if data.mock_data:
        mocks = (MockDataset(vocab_size, data.seq_length, seed + offset) for offset in range(3))
        return Splits(*mocks)
    return build_datasets(data, seed=seed, tokenizer=tokenizer)
