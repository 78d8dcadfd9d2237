"""``init_distributed``, and collectives of ``torch.distributed`` that DeepSpeed names in another way."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_core.errors import LayoutError
from megatron_core.launcher import describe_one_rank, read_integer
from megatron_core.parallel.launch import start_world
from megatron_core.parallel.world import World

TIMEOUT = timedelta(minutes=read_integer("DEEPSPEED_TIMEOUT", 30, least=1))


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the processes of torchrun, unless torch.distributed is initialized; a single process needs no launcher.

    A single process gets torchrun's environment variables, such as ``LOCAL_RANK``, as from DeepSpeed.

    ``dist_backend``: ``gloo``, ``nccl``, or None for the backend of the device; ``ccl`` counts as ``gloo``. Errors:
    ``LayoutError`` if the launcher's variables are inconsistent, or ``dist_init_required=False`` before the
    initialization.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise LayoutError(
            "dist_init_required=False, but torch.distributed is not initialized; call init_process_group first, or "
            "leave dist_init_required out"
        )
    backend = "gloo" if dist_backend in ("ccl", "mpi") else dist_backend
    if init_method is not None and init_method != "env://":
        dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)
        return
    world = World.from_environment()
    if world.size == 1:
        describe_one_rank(distributed_port)  # programs read LOCAL_RANK after this call
        dist.init_process_group(backend or "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    start_world(world, backend=backend or "auto", timeout_minutes=max(timeout.total_seconds() / 60, 1))


def get_local_rank() -> int:
    """Return the number of this process on its host."""
    return read_integer("LOCAL_RANK", 0)


def get_world_group() -> ProcessGroup | None:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the rank in the job of a rank of ``group``."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the ranks of ``group`` in the job."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None) -> Tensor:
    """Sum ``tensor`` over ``group`` in place; return it."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def all_reduce_coalesced(tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Sum each tensor over ``group`` in place."""
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def all_gather_coalesced(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: ProcessGroup | None = None, **_: Any
) -> None:
    """Gather each tensor of ``inputs`` into the tensor of ``outputs`` at its place."""
    for output, part in zip(outputs, inputs, strict=True):
        dist.all_gather_into_tensor(output, part, group=group)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """As ``torch.distributed.all_gather_into_tensor``; gloo too takes an ``input_tensor`` without dimensions."""
    return dist.all_gather_into_tensor(output_tensor, torch.atleast_1d(input_tensor), group=group, async_op=async_op)


def allgather_fn(output: Tensor, tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """As ``all_gather_into_tensor``."""
    return all_gather_into_tensor(output, tensor, group=group, async_op=async_op)


def reduce_scatter_fn(
    output: Tensor, tensor: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """As ``torch.distributed.reduce_scatter_tensor``."""
    return dist.reduce_scatter_tensor(output, tensor, op=op, group=group, async_op=async_op)


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Return torch's device mesh."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return dist.init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)
