"""The layout: grid, process groups, collectives and how parameters are split."""

from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import Group, LocalGroup, ParallelGroups
from megatron_core.parallel.launch import World, run_job, start_world
from megatron_core.parallel.sharding import ShardSpec, spec_of

__all__ = ["Grid", "Group", "LocalGroup", "ParallelGroups", "ShardSpec", "World", "run_job", "spec_of", "start_world"]
