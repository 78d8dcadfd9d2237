"""The layout of parameters in flat buffers, with Megatron's alignment."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_core.data_parallel.bucket_layout import FillRule, InOrder, Packer, matrix_work, round_up
from megatron_core.features.matrix_optimizers.whole_shards import WholeInShards

START_MULTIPLE = 64
"""The offset of each parameter is a multiple of this number of elements."""

pad_to_divisor = round_up


def pad_param_start(param_start_index: int) -> int:
    """Return the next offset at which a parameter may begin."""
    return round_up(param_start_index, START_MULTIPLE)


def bucket_end_divisor(data_parallel_world_size: int, pad_for_high_nccl_busbw: bool) -> int:
    """Return the number of elements that divides the end of a bucket; 2^16 gives NCCL its full bandwidth."""
    return math.lcm(data_parallel_world_size, 128, 2**16 if pad_for_high_nccl_busbw else 1)


def pad_bucket_end(bucket_end_index: int, data_parallel_world_size: int, pad_for_high_nccl_busbw: bool) -> int:
    """Return the padded end of a bucket."""
    return round_up(bucket_end_index, bucket_end_divisor(data_parallel_world_size, pad_for_high_nccl_busbw))


def in_order(shards: int, pad_for_high_nccl_busbw: bool) -> FillRule:
    """Return Megatron's rule for ``DistributedOptimizer``."""
    return InOrder(START_MULTIPLE, bucket_end_divisor(shards, pad_for_high_nccl_busbw))


def whole_in_shards(shards: int, pad_for_high_nccl_busbw: bool) -> FillRule:
    """Return Megatron's rule for ``LayerWiseDistributedOptimizer``."""
    return WholeInShards(shards, START_MULTIPLE, shard_divisor(shards, pad_for_high_nccl_busbw))


def shard_divisor(shards: int, pad_for_high_nccl_busbw: bool) -> int:
    """Return the number of elements that divides the size of a shard if shards contain whole parameters."""
    return math.lcm(START_MULTIPLE, bucket_end_divisor(shards, pad_for_high_nccl_busbw) // shards)


@dataclass(frozen=True)
class BufferKey:
    """The common properties of the parameters of a buffer."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert_parallel: bool
    is_managed_by_layer_wise_optimizer: bool = False


@dataclass
class PerBufferParamLayout:
    """The parameters of a buffer as (first element, end, number of the bucket), and the ranges of its buckets."""

    param_index_map: dict[nn.Parameter, tuple[int, int, int]] = field(default_factory=dict)
    bucket_indices: list[tuple[int, int]] = field(default_factory=list)
    per_bucket_numel_unpadded: list[int] = field(default_factory=list)
    param_indices: list[int] = field(default_factory=list)
    """The indices of the parameters in the buffer."""
    num_optimizer_shards: int | None = None


@dataclass
class FullParamLayout:
    """The layouts of all buffers of a model."""

    layouts: dict[BufferKey, PerBufferParamLayout] = field(default_factory=dict)


def lay_out(
    params: Sequence[nn.Parameter],
    bucket_size: int | None,
    rule: FillRule,
    shards: int | None = None,
    param_indices: Sequence[int] | None = None,
) -> PerBufferParamLayout:
    """Fill buckets by ``rule``, in reverse order; a sharded ``shared_embedding`` has a bucket of its own."""
    layout = PerBufferParamLayout(num_optimizer_shards=shards, param_indices=list(param_indices or range(len(params))))
    packer = Packer[nn.Parameter](rule, 2**62 if bucket_size is None else bucket_size)

    def closed() -> Any:
        for parameter in reversed(params):
            alone = shards is not None and getattr(parameter, "shared_embedding", False)
            yield from packer.add(parameter, parameter.numel(), matrix_work(parameter.shape), alone=alone)
        yield from packer.close()

    first = 0
    for number, (members, placed) in enumerate(closed()):
        for parameter, at in zip(members, placed.offsets, strict=True):
            layout.param_index_map[parameter] = (first + at, first + at + parameter.numel(), number)
        layout.bucket_indices.append((first, first + placed.padded))
        layout.per_bucket_numel_unpadded.append(placed.used)
        first += placed.padded
    return layout


def group_params_for_buffers(
    params: Sequence[nn.Parameter], grad_reduce_in_fp32: bool
) -> dict[BufferKey, tuple[list[nn.Parameter], list[int]]]:
    """Return the parameters of each buffer, in order, and their indices; ``allreduce=False`` marks experts."""
    groups: dict[BufferKey, tuple[list[nn.Parameter], list[int]]] = {}
    for parameter in params:
        grad_dtype = torch.float32 if grad_reduce_in_fp32 else parameter.dtype
        expert, whole = not getattr(parameter, "allreduce", True), "is_managed_by_layer_wise_optimizer"
        key = BufferKey(parameter.dtype, grad_dtype, expert, getattr(parameter, whole, False))
        members, indices = groups.setdefault(key, ([], []))
        indices.append(len(members))
        members.append(parameter)
    return groups
