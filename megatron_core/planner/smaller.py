"""Suggest settings for a run that does not fit into memory: the cheapest changes in time, and their memory."""

from collections.abc import Iterator
from itertools import chain, combinations

from megatron_core.config import RunConfig
from megatron_core.config.partition import layers_by_stage, plan_of
from megatron_core.config.validate import problems, without_data
from megatron_core.errors import ConfigError
from megatron_core.planner.footprint import Footprint
from megatron_core.planner.layout_settings import KEPT, Settings, with_settings
from megatron_core.planner.parameters import rank_units


def predicted_bytes(config: RunConfig, world_size: int, vocab_size: int) -> float:
    """Highest peak bytes over all pipeline ranks."""
    copies = config.parallel.data_parallel_size(world_size)
    plan = plan_of(config, config.training.final_batch_size(copies) // (config.training.micro_batch_size * copies))
    layers = layers_by_stage(config, vocab_size, plan.num_stages)
    units = rank_units(config, layers, plan.stage_to_rank, vocab_size)
    return sum(Footprint.of(config, world_size, plan, layers, units, vocab_size).worst()[1].values())


def settings_that_fit(
    config: RunConfig, world_size: int, vocab_size: int, limit: float, count: int = 3
) -> list[tuple[Settings, float]]:
    """Up to ``count`` changes of settings that reduce every rank's peak to at most ``limit`` bytes, and the new peak.

    Single changes come before pairs of changes, and changes that cost little time before more expensive ones.
    """
    changes: list[tuple[Settings, float]] = []
    single = list(_changes(config, world_size))
    for chosen in chain(((candidate,) for candidate in single), combinations(single, 2)):
        change = {name: value for settings in chosen for name, value in settings.items()}
        other = with_settings(config, change)
        if len(change) < sum(map(len, chosen)) or next(problems(without_data(other), world_size), None) is not None:
            continue
        try:
            needed = predicted_bytes(other, world_size, vocab_size)
        except ConfigError:
            continue  # the schedule does not support this number of micro-batches
        if needed <= limit:
            changes.append((change, needed))
        if len(changes) == count:
            break
    return changes


def _changes(config: RunConfig, world_size: int) -> Iterator[Settings]:
    """Yield changes that reduce a rank's memory, cheapest first."""
    parallel = config.parallel
    size = config.training.micro_batch_size
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    if config.model.recompute_granularity is None:
        yield {"recompute_granularity": "selective"}
    for stage in range(parallel.dp_zero_stage + 1, 4):
        if parallel.data_parallel_size(world_size) > 1:
            yield {"zero_stage": stage, "use_distributed_optimizer": False}
    if size > 1:
        yield {"micro_batch_size": size // 2}
    if config.model.recompute_granularity != "full":
        yield {name: value for name, value in KEPT[2].items() if name != "cpu_offloading"}
    yield {"tensor_model_parallel_size": 2 * tp, "sequence_parallel": True}
    yield {"pipeline_model_parallel_size": 2 * pp}
    if size > 3:
        yield {"micro_batch_size": 1}
