"""The layout: grid, process groups, collectives and how parameters are split.

Names are imported when they are first used: ``parallel.grid`` is free of torch, and importing it must not import torch.
"""

from typing import TYPE_CHECKING

from megatron_core.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_core.parallel.grid import Grid
    from megatron_core.parallel.groups import Group, LocalGroup, ParallelGroups
    from megatron_core.parallel.launch import World, run_job, start_world
    from megatron_core.parallel.sharding import ShardSpec, spec_of

__getattr__ = lazy_names(__name__, __file__)
