"""Sums over whole tensors of which each rank has a part."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_core.data_parallel import Bucket
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import spec_of


def tensor_squares(bucket: Bucket, shards: Sequence[Tensor], groups: ParallelGroups) -> Tensor:
    """Return the sums of squares over each whole tensor of ``bucket``, for each of ``shards``.

    float64 ``[number of shards, number of tensors]``. A collective call of all ranks that share the bucket's tensors.
    """
    squares = torch.zeros(len(shards), len(bucket.parameters), dtype=torch.float64, device=bucket.weights.device)
    number = {parameter: index for index, parameter in enumerate(bucket.parameters)}
    # Each element counts once: for replicated elements, on the lowest rank with a copy.
    for _, parameter, start, stop, offset in bucket.pieces():
        for start_owned, stop_owned in spec_of(parameter).owned_flat_ranges():
            span = slice(max(start_owned, start) - start + offset, min(stop_owned, stop) - start + offset)
            if span.start < span.stop:
                for row, tensor in zip(squares, shards, strict=True):
                    row[number[parameter]] += tensor[span].double().square().sum()
    reduce_over_tensors(bucket, squares, groups)
    return squares


def reduce_over_tensors(bucket: Bucket, values: Tensor, groups: ParallelGroups, *, maximum: bool = False) -> None:
    """Sum ``values``, or with ``maximum`` take their maxima, over all ranks with a part of the bucket's tensors."""
    axes = {"etp" if "edp" in bucket.kind.replica_axes else "tp"}
    for parameter in bucket.parameters:
        axes.update(spec_of(parameter).split_axes)
    if bucket.is_sharded:
        all_reduce_(values, bucket.dp_group, maximum=maximum)
    # Sorted, so that all ranks call the collectives in one order.
    for axis in sorted(axes):
        all_reduce_(values, groups.group(axis), maximum=maximum)
    if bucket.kind.tied:
        all_reduce_(values, groups.tied(bucket.kind.tied), maximum=maximum)
