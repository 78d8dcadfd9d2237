"""Process groups of data, tensor, sequence and expert parallelism."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_core import parallel_state
from megatron_core.errors import LayoutError
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.groups import Group, process_group


def _groups() -> ParallelGroups | None:
    return parallel_state.current() if parallel_state.is_initialized() else None


def _group(axis: str) -> Group | None:
    found = _groups()
    return None if found is None else found.group(axis)


def _number(axis: str, name: str, otherwise: Callable[[], int]) -> Callable[[], int]:
    """Return a function: ``size`` or ``rank`` of a group, and ``otherwise()`` before ``initialize``."""

    def number() -> int:
        group = _group(axis)
        return otherwise() if group is None else int(getattr(group, name)())

    return number


_get_data_parallel_world_size = _number("dp", "size", dist.get_world_size)
_get_data_parallel_rank = _number("dp", "rank", dist.get_rank)
_get_model_parallel_world_size = _number("tp", "size", lambda: 1)
_get_tensor_rank = _number("tp", "rank", lambda: 0)
_get_sequence_parallel_world_size = _number("cp", "size", lambda: 1)
_get_sequence_parallel_rank = _number("cp", "rank", lambda: 0)


def _get_data_parallel_group() -> ProcessGroup | None:
    """Return the ranks with the same part of the model; all ranks before ``initialize``."""
    found = _group("dp")
    return dist.group.WORLD if found is None or found.size() == dist.get_world_size() else process_group(found)


def _get_data_parallel_group_ranks() -> list[int]:
    return dist.get_process_group_ranks(_get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    return _get_data_parallel_group_ranks()[0]


def _get_sequence_parallel_group() -> Any:
    """Return the ranks that share out each sequence."""
    found = _group("cp")
    if found is None or found.size() == 1:
        raise LayoutError("there is no group of sequence parallelism; set sequence_parallel_size in the JSON")
    return process_group(found)


def _get_expert_parallel_ranks(
    world_size: int, tensor_parallel_size_: int, expert_parallel_size_: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks that share out the experts, and the ranks with the same experts, of a job of this size.

    Neighbouring ranks split layers; among the others, neighbours share out the experts.
    """
    copies = world_size // (tensor_parallel_size_ * expert_parallel_size_)
    grid = torch.arange(copies * expert_parallel_size_ * tensor_parallel_size_)
    grid = grid.view(copies, expert_parallel_size_, tensor_parallel_size_).permute(2, 0, 1)
    return grid.flatten(0, 1).tolist(), grid.transpose(1, 2).flatten(0, 1).tolist()


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accept ``ep_size=1``; ``LayoutError`` for expert parallelism."""
    if ep_size > 1:
        raise LayoutError(
            f"ep_size={ep_size}: set expert_parallel.enabled and expert_parallel.autoep_size={ep_size} in the JSON, "
            "which splits the experts of the model"
        )


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = _get_model_parallel_world_size
get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = _get_tensor_rank
get_tensor_model_parallel_rank = _get_tensor_rank
_get_sequence_data_parallel_group = _get_data_parallel_group
_get_sequence_data_parallel_world_size = _get_data_parallel_world_size
_get_sequence_data_parallel_rank = _get_data_parallel_rank
