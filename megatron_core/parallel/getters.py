"""Parts of Megatron Core's ``parallel_state``: getter factories, the encoder-decoder split, the memory buffer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel.current import current, has_current
from megatron_core.parallel.groups import Group

assumed: dict[tuple[str, str], int] = {}
"""Sizes and indices set by ``set_*`` functions, by axes; getters return them instead of the group's."""


def group_getter(axes: str, ranks: str) -> Callable[..., Group | None]:
    """Make the function that returns the group over ``axes``."""

    def group(check_initialized: bool = True) -> Group | None:
        return current().group(axes) if check_initialized or has_current() or not dist.is_initialized() else None

    group.__doc__ = f"""Ranks {ranks}; with ``check_initialized=False`` None while there are no groups yet."""
    return group


def getters(axes: str, ranks: str) -> tuple[Callable[..., Any], ...]:
    """Make Megatron's functions for the group over ``axes``: get the group, its size and this rank's index; set size
    and index without creating groups (None restores those of the group)."""

    def world_size() -> int:
        return assumed[axes, "size"] if (axes, "size") in assumed else current().group(axes).size()

    def rank() -> int:
        return assumed[axes, "index"] if (axes, "index") in assumed else current().group(axes).rank()

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
    assumed.pop(key, None)
    if value is not None:
        assumed[key] = value


def rank_getter(axes: str, index: int, which: str) -> Callable[[], int]:
    """Make the function that returns a global rank of the group over ``axes``."""

    def rank() -> int:
        return current().ranks(axes)[index]

    rank.__doc__ = f"Global rank of the {which}."
    return rank


_, _pipeline_size, _pipeline_rank, _, _ = getters("pp", "that share the layers")
_split: dict[str, int | None] = {"rank": None}


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The first pipeline rank of the decoder of an encoder-decoder model; None if it was not set."""
    return _split["rank"]


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Set the first pipeline rank of the decoder."""
    _split["rank"] = rank


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a pipeline rank, by default this one, has encoder layers; always true without a split."""
    rank, split = _pipeline_rank() if rank is None else rank, _split["rank"]
    return _pipeline_size() == 1 or split is None or rank < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a pipeline rank, by default this one, has decoder layers; always true without a split."""
    rank, split = _pipeline_rank() if rank is None else rank, _split["rank"]
    return _pipeline_size() == 1 or split is None or rank >= split


def is_pipeline_stage_at_split() -> bool:
    """Whether this rank has encoder layers and the next one has decoder layers."""
    rank = _pipeline_rank()
    return is_pipeline_stage_before_split(rank) and is_pipeline_stage_after_split(rank + 1)


class GlobalMemoryBuffer:
    """Reusable memory by name and dtype, which grows as needed; a name must not have two users at a time."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> Tensor:
        """A tensor of this shape in the memory of ``name``, on the current GPU if there is one."""
        size, key = prod(tensor_shape), (name, dtype)
        if key not in self.buffer or self.buffer[key].numel() < size:
            with (mem_alloc_context or nullcontext)():
                self.buffer[key] = torch.empty(size, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
        return self.buffer[key][:size].view(*tensor_shape)
