"""The data of a run: vocabulary size, data sets and records of the data files."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_core.checkpoint.hosts import raise_on_all_ranks
from megatron_core.checkpoint.reader import note
from megatron_core.config import RunConfig
from megatron_core.datasets import FIMDataset, MockDataset, Splits, build_datasets
from megatron_core.datasets.build_conversations import build_conversations
from megatron_core.datasets.megatron_order import build_mock_order, samples_wanted
from megatron_core.datasets.sources import describe_changes, record_sources
from megatron_core.datasets.whole_round import WholeRound
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.parallel import World
from megatron_core.parallel.texts import broadcast_from_rank
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
    data, seed = config.data, config.training.seed
    if (data.dataloader_type == "external") != (provider is not None):
        raise ConfigError(
            f"dataloader_type={data.dataloader_type} and {'no' if provider is None else 'a'} datasets_provider: "
            "external data sets come from a script of yours that calls megatron_core.training.pretrain(config, world, "
            "datasets_provider)"
        )
    if provider is not None:
        splits = provider(config, tokenizer)
    elif data.mock_data and data.data_order == "megatron":
        size, eod = (vocab_size, None) if tokenizer is None else (tokenizer.vocab_size, tokenizer.eod)
        eod = size - 1 if eod is None else eod  # as of NullTokenizer
        masked, wanted = eod if data.eod_mask_loss else None, wanted_samples(config, data_parallel_size)
        train, valid, test = build_mock_order(
            size, eod, wanted, data.seq_length, seed, cache=data.data_cache_path, masked_token=masked
        )
        splits = Splits(train, valid, test)
    elif data.mock_data:
        train, valid, test = (MockDataset(vocab_size, data.seq_length, seed + offset) for offset in range(3))
        splits = Splits(train, valid, test)
    elif data.sft or data.dpo:
        splits = build_conversations(data, seed=seed, tokenizer=tokenizer)
    else:
        splits = build_datasets(data, seed=seed, tokenizer=tokenizer, wanted=wanted_samples(config, data_parallel_size))
    splits = fill_in_the_middle(splits, config, tokenizer) if data.fim_data else splits
    return for_evaluation(splits, config)


def for_evaluation(splits: Splits, config: RunConfig) -> Splits:
    """With ``full_validation``, restrict the evaluated data sets to one round."""
    if not config.data.full_validation:
        return splits
    valid, test = (None if own is None else WholeRound(own) for own in (splits.valid, splits.test))
    return replace(splits, valid=valid, test=test, named={name: WholeRound(own) for name, own in splits.named.items()})


def wanted_samples(config: RunConfig, data_parallel_size: int) -> dict[str, int]:
    """Number of samples that Megatron-LM requests of each split; without ``eval_interval``, it evaluates once, at the
    end."""
    training = config.training
    iterations = training.num_iterations(data_parallel_size, config.data.seq_length)
    numbers = samples_wanted(
        global_batch_size=training.final_batch_size(data_parallel_size),
        train_iters=training.train_iters,
        train_samples=training.train_samples,
        eval_interval=training.eval_interval or iterations + 1,
        eval_iters=training.eval_iters,
        eval_batch_size=training.eval_global_batch_size,
    )
    return dict(zip(("train", "valid", "test"), numbers, strict=True))


def compare_data(config: RunConfig, state: TrainState, world: World) -> list[dict[str, Any]]:
    """Records of the files that this run reads; empty without training.

    Rank 0 reads the files and prints their changes since the checkpoint of ``state``.

    Raises ``CheckpointError`` on all ranks if rank 0 cannot read a file.
    """
    if config.training.skip_train:
        return []
    found, problem = "", ""
    if world.rank == 0:
        try:
            found = json.dumps(record_sources(config.data))
        except (OSError, MegatronError) as error:
            problem = f"the data cannot be compared with the files that the checkpoint records: {error}"
    raise_on_all_ranks(problem, world.device)
    records = json.loads(broadcast_from_rank(0, found, world.device))
    for sentence in describe_changes(state.data, records, state.consumed_samples) if state.data and records else ():
        note(sentence)
    return records


def fill_in_the_middle(splits: Splits, config: RunConfig, tokenizer: Tokenizer | None) -> Splits:
    """Wrap the splits in ``FIMDataset``, which rearranges documents for fill-in-the-middle (``--fim-data``)."""
    parts = {name: getattr(splits, name) for name in ("train", "valid", "test")}
    assert tokenizer is not None, "the configuration's rules ask for one"
    wrapped: dict[str, Any] = {
        name: FIMDataset(part, tokenizer, config.data, config.training.seed)
        for name, part in parts.items()
        if part is not None
    }
    named = {name: FIMDataset(own, tokenizer, config.data, config.training.seed) for name, own in splits.named.items()}
    return replace(splits, named=named, **wrapped)
