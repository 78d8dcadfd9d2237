"""Rules of batches that grow."""

from collections.abc import Iterator

from megatron_core.config.rule_helpers import leaves_rest
from megatron_core.config.rules_training import MOST_MICRO_BATCHES, copies_of
from megatron_core.config.run import RunConfig
from megatron_core.features.batch_growth.settings import MOST_INCREMENTS, BatchGrowthConfig, Ramp, parse_steps


def grows(config: RunConfig) -> bool:
    """Whether the batches of a run grow."""
    training = config.training.section(BatchGrowthConfig)
    return training.rampup_batch_size is not None or training.step_batch_size_schedule is not None


def batch_growth_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that a ramp ends exactly at its last value, and that all batches fit the layout."""
    copies = copies_of(config, world_size)
    training = config.training.section(BatchGrowthConfig)
    if copies is None or training.micro_batch_size < 1:
        return
    if training.step_batch_size_schedule is not None:
        yield from _step_problems(config, copies)
    elif training.rampup_batch_size is not None:
        yield from _rampup_problems(config, copies)


def _rampup_problems(config: RunConfig, copies: int) -> Iterator[str]:
    training = config.training.section(BatchGrowthConfig)
    assert training.rampup_batch_size is not None, "checked by the caller"
    ramp = Ramp(*training.rampup_batch_size, training.final_batch_size(copies))
    micro = training.micro_batch_size
    at_once = f"micro_batch_size x data-parallel size = {micro} x {copies} = {micro * copies}"
    yield from fit_problems("rampup_batch_size", ramp, "global_batch_size", micro * copies, at_once)
    if (plan := config.optional("pipeline_plan")) is not None:
        yield (
            f"rampup_batch_size={ramp} needs a plan for each number of micro-batches, but "
            f"pipeline_plan={plan} is for one number; use --pipeline-schedule"
        )


def _step_problems(config: RunConfig, copies: int) -> Iterator[str]:
    """The first fault of a schedule of batch sizes."""
    training = config.training.section(BatchGrowthConfig)
    text, at_once = " ".join(training.step_batch_size_schedule or ()), training.micro_batch_size * copies
    head = f"step_batch_size_schedule={text}"
    steps = parse_steps((text,), config.data.seq_length)
    begins, sizes = [samples for samples, _ in steps], [size for _, size in steps]
    if not steps or begins[0] != 0 or len(set(begins)) < len(begins):
        yield f"{head} must be TOKENS:SIZE pairs with rising tokens from 0 on, for example 0:384 200B:768"
    elif any(size < 1 or size % at_once for size in sizes):
        yield (
            f"{head}: each size must be a multiple of micro_batch_size x data-parallel size = "
            f"{training.micro_batch_size} x {copies} = {at_once}"
        )
    elif max(sizes) // at_once > MOST_MICRO_BATCHES:
        yield f"{head}: the largest size makes more than {MOST_MICRO_BATCHES} micro-batches in a step; lower it"
    elif training.global_batch_size not in (None, sizes[-1]):
        yield f"{head} ends at {sizes[-1]}, and global_batch_size={training.global_batch_size}; remove one of them"
    for name in ("rampup_batch_size", "pipeline_plan"):
        if (value := config.optional(name)) is not None:
            yield f"{head} and {name}={value} exclude one another; remove one of them"


def fit_problems(name: str, ramp: Ramp, end_name: str, divisor: int, divisor_shown: str) -> Iterator[str]:
    """The first fault of the ramp of the setting ``name``."""
    rise = ramp.end - ramp.start
    uneven = [value for value in ("start", "increment") if leaves_rest(getattr(ramp, value), divisor)]
    if ramp.increment < 1 or ramp.samples < 1:
        yield f"{name}={ramp} needs an increment and a number of samples above 0"
    elif rise // ramp.increment > MOST_INCREMENTS:
        count = rise // ramp.increment
        yield f"{name}={ramp} makes {count} increments; legal: up to {MOST_INCREMENTS}, with a larger increment"
    elif ramp.start < 1 or rise < 1 or rise % ramp.increment:
        start = ramp.end % ramp.increment or min(ramp.increment, ramp.end)
        yield (
            f"{name}={ramp} does not end at {end_name}={ramp.end}; legal: a start from 1 to {ramp.end - 1}, with "
            f"{end_name} - start a multiple of the increment, for example {start} {ramp.increment} {ramp.samples}"
        )
    elif uneven:
        yield f"{name}={ramp}: {' and '.join(uneven)} must be a multiple of {divisor_shown}"
