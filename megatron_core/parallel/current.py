"""The process's current groups, which Megatron Core's getters (``parallel_state``) and default arguments read."""

from __future__ import annotations

import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.parallel.groups import Group, ParallelGroups

_current: list[ParallelGroups] = []


def set_current(groups: ParallelGroups | None) -> None:
    """Make ``groups`` the layout of this process; None forgets it."""
    _current[:] = [] if groups is None else [groups]


def has_current() -> bool:
    """Whether a layout is current."""
    return bool(_current)


def current() -> ParallelGroups:
    """The layout of this process; without torch.distributed that of a single rank. ``LayoutError`` before it is set."""
    if not _current:
        if dist.is_initialized():
            raise LayoutError("no model parallel groups yet; call parallel_state.initialize_model_parallel first")
        return ParallelGroups.single()
    return _current[0]


def tensor_parallel_group(group: Group | None = None) -> Group:
    """The given group, or the current layout's tensor-parallel one."""
    return current().group("tp") if group is None else group
