"""Tensors from the last pipeline stage to all, between neighbouring stages, and from one rank to the job."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.pipeline_parallel.utils import is_pp_first_stage as is_pipeline_first_stage
from megatron.core.pipeline_parallel.utils import is_pp_last_stage as is_pipeline_last_stage
from megatron_core import parallel_state


def _pipeline(pp_group: Any) -> Any:
    return parallel_state.get_pipeline_model_parallel_group() if pp_group is None else pp_group


def broadcast_from_last_pipeline_stage(
    size: Sequence[int], dtype: torch.dtype, tensor: Tensor | None = None, pp_group: Any = None
) -> Tensor | None:
    """Return the ``tensor`` of the last stage, of shape ``size``, on every stage."""
    group = _pipeline(pp_group)
    if group.size() == 1:
        return tensor
    if tensor is None or not is_pipeline_last_stage(group):
        tensor = torch.empty(tuple(size), dtype=dtype)
    dist.broadcast(tensor, group=group, group_src=group.size() - 1)
    return tensor


def recv_from_prev_pipeline_rank_(recv_buffer: Tensor, pp_group: Any = None) -> None:
    """Receive ``recv_buffer`` from the previous stage."""
    group = _pipeline(pp_group)
    dist.recv(recv_buffer, group=group, group_src=(group.rank() - 1) % group.size())


def send_to_next_pipeline_rank(tensor: Tensor | None = None, pp_group: Any = None) -> None:
    """Send ``tensor`` to the next stage."""
    group = _pipeline(pp_group)
    assert tensor is not None, "there is nothing to send"
    dist.send(tensor, group=group, group_dst=(group.rank() + 1) % group.size())


def broadcast_tensor(
    size: Any, dtype: torch.dtype, tensor: Tensor | None = None, rank: int = 0, data_parallel: bool = False
) -> Tensor:
    """Return the ``tensor`` of ``rank``, of shape ``size``, on all ranks.

    With ``data_parallel`` it is that of the first rank of each model, for the ranks of this model.
    """
    group: Any = parallel_state.get_model_parallel_group() if data_parallel else None
    source = parallel_state.get_model_parallel_src_rank() if data_parallel else rank
    if dist.get_rank() != source:
        tensor = torch.empty(size, dtype=dtype)
    assert tensor is not None, "the source has no tensor"
    dist.broadcast(tensor, source, group=group)
    return tensor


def broadcast_list(
    size: int, dtype: torch.dtype, list_values: Sequence[Any] | None = None, rank: int = 0, data_parallel: bool = False
) -> Tensor:
    """Return the numbers of ``rank`` as a tensor ``[size]`` on all ranks; see ``broadcast_tensor``."""
    tensor = None if list_values is None else torch.tensor(list_values, dtype=dtype)
    return broadcast_tensor(size, dtype, tensor, rank, data_parallel)


def broadcast_int_list(
    size: int, int_list: Sequence[int] | None = None, rank: int = 0, data_parallel: bool = False
) -> Tensor:
    """Return the integers of ``rank`` on all ranks; see ``broadcast_tensor``."""
    return broadcast_list(size, torch.int64, int_list, rank, data_parallel)


def broadcast_float_list(
    size: int, float_list: Sequence[float] | None = None, rank: int = 0, data_parallel: bool = False
) -> Tensor:
    """Return numbers of ``rank`` as float32 on all ranks; see ``broadcast_tensor``."""
    return broadcast_list(size, torch.float32, float_list, rank, data_parallel)
