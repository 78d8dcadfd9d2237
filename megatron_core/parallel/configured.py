"""The grid and the groups of a configured layout."""

from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from megatron_core.config import ParallelConfig
from megatron_core.parallel.current import set_current
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.time_limit import group_limit
from megatron_core.parallel.world import World


def make_groups(
    config: ParallelConfig, world: World, *, ends: tuple[int, int] = (0, -1), outer_groups: int = 1
) -> ParallelGroups:
    """Create the groups of a configured layout, also for a single process, and make them current.

    ``ends`` are the pipeline ranks of the first and the last stage; ``outer_groups``: see ``ParallelGroups``.
    """
    backend = dist.get_backend() if dist.is_initialized() else ""
    timeout = timedelta(seconds=group_limit(backend, 60.0 * config.distributed_timeout_minutes))
    groups = ParallelGroups(
        grid_of(config, world.size, world.rank, outer_groups),
        world.rank,
        outer_groups=outer_groups,
        ends=ends,
        instances=config.num_distributed_optimizer_instances,
        a2a_size=config.a2a_size,
        timeout=timeout,
    )
    world.prefix = groups.prefix if world.size > 1 else ""
    if world.watchdog is not None:
        world.watchdog.prefix = world.prefix
    set_current(groups)
    return groups


def grid_of(config: ParallelConfig, world_size: int, rank: int = 0, outer_groups: int = 1) -> Grid:
    """The grid of a configured layout; with several outer groups, that of the group of ``rank``."""
    # Outer groups are neighbours, so that their inner communication, which is in every step, stays on near ranks.
    size = world_size // outer_groups
    grid = Grid.fit(
        size,
        tp=config.tensor_model_parallel_size,
        cp=config.context_parallel_size,
        pp=config.pipeline_model_parallel_size,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size,
        order=config.rank_order,
    )
    return replace(grid, rank_offset=rank // size * size) if outer_groups > 1 else grid
