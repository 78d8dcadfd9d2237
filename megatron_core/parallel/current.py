"""The current groups of this rank, read by Megatron Core's getters (``parallel_state``) and default arguments."""

import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.rank_local import RankLocal

_current: RankLocal[ParallelGroups | None] = RankLocal(lambda: None)


def set_current(groups: ParallelGroups | None) -> None:
    """Make ``groups`` the layout of this rank; None clears it."""
    _current.set(groups)


def has_current() -> bool:
    """Whether a layout is set."""
    return _current() is not None


def current() -> ParallelGroups:
    """The layout of this rank; a single rank without torch.distributed. ``LayoutError`` if none is set yet."""
    groups = _current()
    if groups is None:
        # A silent default would be wrong: every rank of a job would compute as if it were alone.
        if dist.is_initialized():
            raise LayoutError("no model parallel groups yet; call parallel_state.initialize_model_parallel first")
        return ParallelGroups.single()
    return groups


def tensor_parallel_group(group: Group | None = None) -> Group:
    """``group``, or by default the current layout's tensor-parallel group."""
    return current().group("tp") if group is None else group
