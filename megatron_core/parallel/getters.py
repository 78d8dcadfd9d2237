"""Factories of the getters in ``parallel_state``."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_core.parallel.current import current, has_current
from megatron_core.parallel.groups import Group
from megatron_core.parallel.rank_local import RankLocal

assumed: RankLocal[dict[tuple[str, str], int]] = RankLocal(dict)
"""Sizes and indices set by ``set_*`` functions, by axes; getters return them instead of the group's."""


def group_getter(axes: str, ranks: str) -> Callable[..., Group | None]:
    """Make the function that returns the group over ``axes``."""

    def group(check_initialized: bool = True) -> Group | None:
        return current().group(axes) if check_initialized or has_current() or not dist.is_initialized() else None

    group.__doc__ = f"""Ranks {ranks}; with ``check_initialized=False`` None while there are no groups yet."""
    return group


# One factory, because Megatron's getters of different groups differ only in the axes.
def getters(axes: str, ranks: str) -> tuple[Callable[..., Any], ...]:
    """Make Megatron's functions for the group over ``axes``: get the group, its size and this rank's index; set size
    and index without creating groups (None restores those of the group)."""

    def world_size() -> int:
        return assumed()[axes, "size"] if (axes, "size") in assumed() else current().group(axes).size()

    def rank() -> int:
        return assumed()[axes, "index"] if (axes, "index") in assumed() else current().group(axes).rank()

    def set_world_size(world_size: int | None) -> None:
        assume((axes, "size"), world_size)

    def set_rank(rank: int | None) -> None:
        assume((axes, "index"), rank)

    world_size.__doc__ = f"Number of the ranks {ranks}."
    rank.__doc__ = f"This rank's index among the ranks {ranks}."
    set_world_size.__doc__ = f"Assume a number of the ranks {ranks}; None: that of the groups."
    set_rank.__doc__ = f"Assume an index among the ranks {ranks}; None: that of the groups."
    return group_getter(axes, ranks), world_size, rank, set_world_size, set_rank


def assume(key: tuple[str, str], value: int | None) -> None:
    """Store a size or an index; None removes it."""
    assumed().pop(key, None)
    if value is not None:
        assumed()[key] = value


def rank_getter(axes: str, index: int, which: str) -> Callable[[], int]:
    """Make the function that returns a global rank of the group over ``axes``."""

    def rank() -> int:
        return current().ranks(axes)[index]

    rank.__doc__ = f"Global rank of the {which}."
    return rank
