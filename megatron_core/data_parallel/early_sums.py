"""Sums of gradients: of partial ones over model axes, and those that start before all gradients are complete."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.data_parallel.settings import DataParallelSettings
from megatron_core.data_parallel.unit_sync import UnitSync
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.meter import COMPRESSED, METER
from megatron_core.parallel.sharding import Split, spec_of


class EarlySums:
    """Starts the sums of buckets as soon as their gradients are complete; a part of ``DataParallel``."""

    buckets: list[Bucket]
    settings: DataParallelSettings
    groups: ParallelGroups
    _sync: Mapping[int, UnitSync]
    on_final: Callable[[Bucket], object] | None = None
    """Called when a bucket's ``grad_shard`` is complete, in the backward pass if its sum runs there."""
    _waiting: dict[Bucket, set[nn.Parameter]]
    """Parameters whose gradients the early sum of a bucket waits for."""

    def enable_grad_sync(self, stage: int) -> None:
        """Announce that the next backward of ``stage`` is its last in this step."""
        # Known only before the last backward: earlier ones accumulate in the same memory.
        early = [b for b in self._early(stage) if self.settings.overlap_grad_reduce or self._needs_no_sum(b)]
        self._waiting.update({bucket: set(bucket.parameters) for bucket in early})
        if stage in self._sync:
            self._sync[stage].on_reduced = self._announce

    def start_grad_sync(self, stage: int) -> None:
        """Start to reduce the complete gradients of ``stage``.

        It is for a last backward that is split, because its parameters finish in no known order.
        """
        if self.settings.overlap_grad_reduce:
            for bucket in self._early(stage):
                if not bucket.reduced:
                    self._start_early(bucket)

    def _early(self, stage: int) -> list[Bucket]:
        """Buckets whose sums may start before all gradients of the step are complete."""
        # Partial gradients need sums over model axes first, for which other ranks may not be ready in this backward.
        complete = (b for b in self.buckets if b.stage == stage and not b.kind.is_partial)
        return [b for b in complete if b.compresses or not b.splits_grads]

    def _reduce_ready(self, stage: int) -> None:
        """Start complete buckets in order, none before its predecessor: all ranks must start them in the same order."""
        for bucket in self._early(stage):
            if bucket.reduced:
                continue
            # Only the first incomplete bucket is waited for: with another order on each rank, collectives would meet
            # wrong ones.
            if self._waiting.get(bucket, {None}):
                return
            self._start_early(bucket)

    def _start_early(self, bucket: Bucket) -> None:
        """Start a bucket's sum, and continue the compressed sums that started before it, each by one message.

        Sums that have been sent completely are finished if their memory or their result is needed.
        """
        if bucket.splits_grads:
            bucket.open_grads()
        start_sum(bucket)
        for earlier in self._early(bucket.stage):
            if earlier is bucket:
                break
            needed = earlier.is_reducing and (earlier.splits_grads or self.on_final is not None)
            if earlier.continue_reduce() and needed:
                earlier.finish_reduce()
                self._announce(earlier)
        if self._needs_no_sum(bucket):
            self._announce(bucket)

    def _start_reduce(self, bucket: Bucket) -> None:
        """Start a bucket's reduction after the sums that must precede it."""
        if bucket.splits_grads:
            bucket.open_grads()
        # At stages 2 and 3 sums over model axes follow on the shard, with a fraction of the bytes. Shared ranges need
        # whole gradients: ranks hold them at different offsets.
        (complete_shared if bucket.completes_shard else complete_gradients)(bucket, self.groups)
        start_sum(bucket)

    def _needs_no_sum(self, bucket: Bucket) -> bool:
        """Whether a bucket's gradients are final after the last backward, and something waits for them."""
        return self.on_final is not None and bucket.dp_group.size() == 1

    def _announce(self, bucket: Bucket) -> None:
        """Announce gradients whose sum over the data-parallel ranks is complete, unless others follow."""
        if self.on_final is not None and not bucket.kind.is_partial and bucket.instances.size() == 1:
            bucket.round_sum()
            self.on_final(bucket)


def start_sum(bucket: Bucket) -> None:
    """Start the sum of a bucket's gradients over its data-parallel ranks."""
    is_rounded = bucket.wire_dtype != bucket.grads.dtype
    with METER.labelled(COMPRESSED if is_rounded else None):
        bucket.start_reduce()


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
    spec = spec_of(parameter)
    grad = parameter.main_grad
    extent = 0
    start_of = {}
    for start, stop in spec.all_shared_ranges(split):
        # Only the shared ranges are sent, one after the other in a tensor with a place for each on every rank.
        start_of[start, stop] = extent
        extent = extent + stop - start
    total = grad.new_zeros((*grad.shape[: split.dim], extent, *grad.shape[split.dim + 1 :]))
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for (first, end), shared in spec.shared_ranges(split):
        size = end - first
        pairs.append((grad.narrow(split.dim, first, size), total.narrow(split.dim, start_of[shared], size)))
    for local, sum_ in pairs:
        sum_.copy_(local)
    all_reduce_(total, group)
    for local, sum_ in pairs:
        local.copy_(sum_)
