"""Broadcast of a batch from the first rank of a tensor-parallel group to the others."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.errors import DataError
from megatron_core.parallel.collectives import broadcast_
from megatron_core.parallel.current import tensor_parallel_group
from megatron_core.parallel.groups import Group, process_group

MAX_DIMS = 5


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype, tp_group: Group | None = None
) -> dict[str, Tensor]:
    """Broadcast ``data[key]`` for every key from the group's first rank to the others, which may pass None.

    Tensors have ``datatype`` and at most five dims; they may differ in shape. One broadcast carries the shapes, one all
    values. ``DataError`` for another dtype, before anything is sent.
    """
    group = tensor_parallel_group(tp_group)
    first = group.rank() == 0
    tensors: Mapping[str, Tensor] = {} if data is None else data
    # Checked on the first rank before anything is sent: the others would wait for the values.
    for key in keys if first else ():
        tensor = tensors.get(key)
        if tensor is None or tensor.dtype != datatype or tensor.dim() > MAX_DIMS:
            description = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
            raise DataError(
                f"broadcast_data: {key} is {description}; it must be {datatype} with at most {MAX_DIMS} dims"
            )
    if group.size() == 1:
        return {key: tensors[key] for key in keys}
    device = _device_of(group)
    source = dist.get_global_rank(process_group(group), 0)
    shapes = _broadcast_shapes([tuple(tensors[key].shape) for key in keys] if first else None, len(keys), source, group)
    sizes = [prod(shape) for shape in shapes]
    # One message for all tensors: a batch has several small ones, each of which would cost a latency.
    flat = torch.empty(sum(sizes), dtype=datatype, device=device)
    if first:
        torch.cat([tensors[key].reshape(-1).to(device) for key in keys], out=flat)
    broadcast_(flat, source, group)
    flat_tensors = flat.split(sizes)
    return {key: values.view(shape) for key, values, shape in zip(keys, flat_tensors, shapes, strict=True)}


def _broadcast_shapes(
    shapes: list[tuple[int, ...]] | None, count: int, source: int, group: Group
) -> list[tuple[int, ...]]:
    """Broadcast the shapes of the first rank, padded with -1 to ``MAX_DIMS`` dims."""
    table = torch.full((count, MAX_DIMS), -1, dtype=torch.int64)
    for row, shape in enumerate(shapes or ()):
        table[row, : len(shape)] = torch.tensor(shape, dtype=torch.int64)
    table = table.to(_device_of(group))
    broadcast_(table, source, group)
    return [tuple(extent for extent in row if extent >= 0) for row in table.tolist()]


def _device_of(group: Group) -> torch.device:
    """The device of tensors for the group's backend."""
    if dist.get_backend(process_group(group)) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
