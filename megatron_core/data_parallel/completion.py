"""Sums of partial gradients over model axes and over the stages with a tied weight."""

import torch
from torch import nn

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import Split, spec_of


def complete_gradients(bucket: Bucket, groups: ParallelGroups) -> None:
    """Sum a bucket's partial gradients over the axes of its kind."""
    _sum_over_model_axes(bucket, bucket.grads, groups)
    complete_shared(bucket, groups)


def complete_shard(bucket: Bucket, groups: ParallelGroups) -> None:
    """Sum element by element over the model axes on the shard alone: ranks with the same bucket shard it equally."""
    _sum_over_model_axes(bucket, bucket.sum_shard, groups)


def complete_shared(bucket: Bucket, groups: ParallelGroups) -> None:
    """Sum the ranges that several ranks hold at different offsets; requires whole gradients."""
    for parameter in bucket.parameters:
        for split in spec_of(parameter).splits:
            if split.axis in bucket.kind.shared_axes and split.shared:
                _sum_shared_ranges(parameter, split, groups.group(split.axis))


def _sum_over_model_axes(bucket: Bucket, grads: torch.Tensor, groups: ParallelGroups) -> None:
    for axis in bucket.kind.partial_axes:
        all_reduce_(grads, groups.group(axis))
    if bucket.kind.tied:
        all_reduce_(grads, groups.tied(bucket.kind.tied))


def _sum_shared_ranges(parameter: nn.Parameter, split: Split, group: Group) -> None:
    """Sum the ranges of the gradient that several ranks of ``group`` hold (keys and values) over these ranks."""
    spec, grad, extent, start_of = spec_of(parameter), parameter.main_grad, 0, {}
    for start, stop in spec.all_shared_ranges(split):
        start_of[start, stop], extent = extent, extent + stop - start
    total = grad.new_zeros((*grad.shape[: split.dim], extent, *grad.shape[split.dim + 1 :]))
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for (first, last), whole in spec.shared_ranges(split):
        size = last - first
        pairs.append((grad.narrow(split.dim, first, size), total.narrow(split.dim, start_of[whole], size)))
    for own, sum_ in pairs:
        sum_.copy_(own)
    all_reduce_(total, group)
    for own, sum_ in pairs:
        own.copy_(sum_)
