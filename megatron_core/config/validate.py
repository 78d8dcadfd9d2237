"""Finds all faults of a configuration at once, with a message for each that says how to correct it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_core.config.optimizers import optimizer_problems
from megatron_core.config.rules_attention import model_problems
from megatron_core.config.rules_data import (
    bad_step_problems,
    checkpoint_problems,
    data_problems,
    given_sources,
    tokenizer_problems,
)
from megatron_core.config.rules_parallel import parallel_problems, schedule_problems, split_problems
from megatron_core.config.rules_sharding import recompute_problems, sharding_problems
from megatron_core.config.rules_single import illegal_values, needless_settings, wrong_types
from megatron_core.config.rules_training import (
    batch_problems,
    learning_rate_problems,
    length_problems,
    precision_problems,
)
from megatron_core.config.run import RunConfig, RunContext
from megatron_core.errors import ConfigError
from megatron_core.feature import features


def problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a message for each fault: the setting, its value, and the legal values or another way out.

    A pure function of its arguments: it changes nothing and reads no file, device or environment variable.
    A fault that follows from another one is not reported separately.
    """
    if world_size < 1:
        yield f"world_size={world_size} is out of range; it must be an integer >= 1"
    # Once for all of these rules: it collects the sections of all features, and a search validates many layouts.
    run = RunContext.of_sections(config.sections())
    values = run.flat()
    yield from illegal_values(values)
    if any(wrong_types(values)):
        return  # the other rules assume legal types and known words
    yield from needless_settings(values, run)
    # By topic, so that messages about the same settings stand next to each other.
    yield from model_problems(config)
    yield from split_problems(config)
    yield from parallel_problems(config, world_size)
    yield from config.parallel.stage_problems(config)
    yield from schedule_problems(config)
    yield from recompute_problems(config)
    yield from sharding_problems(config, world_size)
    yield from batch_problems(config, world_size)
    yield from length_problems(config, world_size)
    yield from learning_rate_problems(config, world_size)
    yield from precision_problems(config)
    yield from optimizer_problems(config.optimizer)
    yield from data_problems(config)
    yield from tokenizer_problems(config)
    yield from checkpoint_problems(config)
    yield from bad_step_problems(config)
    for feature in features():
        if feature.problems is not None:
            yield from feature.problems(config, world_size)


def largest_world_size(config: RunConfig, most: int) -> int:
    """The largest number of ranks, at most ``most``, on which ``config`` has no problem; ``most`` if there is none."""
    step = config.parallel.model_parallel_size
    sizes = range(most // step * step, 0, -step) if step > 0 else ()
    return next((size for size in sizes if next(problems(config, size), None) is None), most)


def check(config: RunConfig, world_size: int, faults: Sequence[str] = ()) -> None:
    """Raise one ``ConfigError`` with all messages, numbered, if there are any; ``faults`` come first."""
    messages = [*faults, *problems(config, world_size)]
    if messages:
        raise ConfigError(numbered(messages, "1 rank" if world_size == 1 else f"{world_size} ranks"))


def numbered(messages: Sequence[str], where: str) -> str:
    """One message for all faults."""
    heading = "One setting" if len(messages) == 1 else f"{len(messages)} settings"
    lines = [f"  {number}. {sentence}" for number, sentence in enumerate(messages, 1)]
    return "\n".join([f"{heading} cannot be used on {where}:", *lines])


def without_data(config: RunConfig) -> RunConfig:
    """``config`` with what only training itself needs: a source of tokens, a length, and kernels for the device."""
    data, training = config.data, config.training
    if data.dataloader_type != "external" and not given_sources(data):
        # Not mock data: some kinds of data, such as conversations, are never generated. The path is not opened.
        data = replace(data, data_path=("tokens",))
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=1)
    return replace(config, data=data, training=training, model=replace(config.model, kernel_backend="reference"))
