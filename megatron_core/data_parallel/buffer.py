"""Parameters and gradients of a stage in flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core.parallel.collectives import Done, Handle, all_gather_flat_, all_reduce_, reduce_scatter_flat_
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.poison import poison_outside
from megatron_core.parallel.sharding import spec_of

SHARD_MULTIPLE = 8
"""Elements of which a shard has a whole multiple, so that each begins at 16 bytes, which kernels read at once."""


@dataclass(frozen=True)
class BucketKind:
    """What all parameters of a bucket have in common, the same on every rank that has a part or a copy of them."""

    dtype: torch.dtype
    decay: bool
    """Whether weight decay applies: matrices and tables yes, biases and norms no."""
    replica_axes: tuple[str, ...]
    """Data axes over which gradients are summed."""
    partial_axes: tuple[str, ...] = ()
    """Model axes over which whole gradients are summed first."""
    shared_axes: tuple[str, ...] = ()
    """Model axes over which gradients of shared ranges are summed first (keys and values of a fused QKV matrix)."""
    tied: bool = False
    """Gradients are summed over the first and the last pipeline stage first."""

    @classmethod
    def of(cls, parameter: nn.Parameter, groups: ParallelGroups) -> BucketKind:
        """The kind of bucket that a parameter belongs to."""
        spec = spec_of(parameter)
        shared = (split.axis for split in spec.splits if split.shared)
        return cls(
            dtype=parameter.dtype,
            decay=len(spec.global_shape) > 1,
            replica_axes=spec.replica_axes,
            partial_axes=tuple(axis for axis in spec.partial_axes if groups.size(axis) > 1),
            shared_axes=tuple(axis for axis in shared if groups.size(axis) > 1),
            tied=spec.tied,
        )

    @property
    def is_partial(self) -> bool:
        """Whether gradients have to be completed before they are summed over data-parallel ranks."""
        return bool(self.partial_axes or self.shared_axes or self.tied)


class Bucket:
    """Parameters that lie one after another in one flat buffer, and their gradients in another.

    ``parameter.data`` becomes a view of ``weights`` and ``parameter.main_grad`` a view of ``grads`` (float32 for 16-bit
    weights). The end is padded so that the data-parallel ranks' shards are equal and begin at 16 bytes. From
    ``zero_stage`` 1 on this rank updates ``shard``, one of those parts; at stage 0 ``shard`` is the whole bucket.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        kind: BucketKind,
        stage: int,
        dp_group: Group,
        zero_stage: int,
    ) -> None:
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        self.kind, self.stage, self.dp_group, self.is_sharded = kind, stage, dp_group, zero_stage > 0
        first = self.parameters[0]
        numel = sum(p.numel() for p in self.parameters)
        step = dp_group.size() * SHARD_MULTIPLE
        padded = -(-numel // step) * step
        grad_dtype = torch.promote_types(first.dtype, torch.float32)
        self.weights = torch.zeros(padded, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(padded, dtype=grad_dtype, device=first.device)
        self.offsets: list[int] = []
        at = 0
        for parameter in self.parameters:
            self._adopt(parameter, at)
            self.offsets.append(at)
            at += parameter.numel()
        part = padded // dp_group.size()
        self.shard = (
            slice(dp_group.rank() * part, (dp_group.rank() + 1) * part) if self.is_sharded else slice(0, padded)
        )
        self._reducing: Handle = Done()
        self.gathering: Handle = Done()
        self.reduced = False

    def _adopt(self, parameter: nn.Parameter, at: int) -> None:
        view = self.weights[at : at + parameter.numel()].view_as(parameter)
        view.copy_(parameter.data)
        parameter.data = view
        parameter.main_grad = self.grads[at : at + parameter.numel()].view_as(parameter)

    @property
    def is_writer(self) -> bool:
        """Whether this rank counts and saves ``shard``: of equal copies only the first one."""
        return self.is_sharded or self.dp_group.rank() == 0

    @property
    def weight_shard(self) -> Tensor:
        """This rank's part of the weights."""
        return self.weights[self.shard]

    @property
    def grad_shard(self) -> Tensor:
        """This rank's part of the gradients; complete once they have been reduced."""
        return self.grads[self.shard]

    def start_reduce(self) -> None:
        """Begin to sum the gradients over the data-parallel ranks."""
        if self.is_sharded:
            self._reducing = reduce_scatter_flat_(self.grad_shard, self.grads, self.dp_group, async_op=True)
        else:
            self._reducing = all_reduce_(self.grads, self.dp_group, async_op=True)
        self.reduced = True

    def finish_reduce(self) -> None:
        """Wait for the sums."""
        self._reducing.wait()
        self._reducing = Done()
        poison_outside(self.grads, self.shard)

    def start_gather(self) -> None:
        """Begin to collect the other ranks' updated weights."""
        if self.is_sharded:
            poison_outside(self.weights, self.shard)
            self.gathering = all_gather_flat_(self.weights, self.weight_shard, self.dp_group, async_op=True)

    def finish_gather(self) -> None:
        """Wait for the weights."""
        self.gathering.wait()
        self.gathering = Done()

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        self.grads.zero_()
        self.reduced = False

    def pieces(self) -> Iterable[tuple[str, nn.Parameter, int, int, int]]:
        """What this rank's shard covers: name, parameter, its first and last element, their offset in the shard."""
        for name, parameter, offset in zip(self.names, self.parameters, self.offsets, strict=True):
            start = max(self.shard.start - offset, 0)
            stop = min(self.shard.stop - offset, parameter.numel())
            if start < stop:
                yield name, parameter, start, stop, offset + start - self.shard.start

    def owned_ranges(self) -> list[tuple[int, int]]:
        """Ranges of the shard that count for this rank in a sum over all ranks, neighbours joined."""
        ranges: list[tuple[int, int]] = []
        for _, parameter, start, stop, at in self.pieces() if self.is_writer else ():
            for first, last in spec_of(parameter).owned_flat_ranges():
                begin, end = max(first, start) - start + at, min(last, stop) - start + at
                if begin < end:
                    joined = ranges.pop()[0] if ranges and ranges[-1][1] == begin else begin
                    ranges.append((joined, end))
        return ranges


def make_buckets(
    units: Iterable[Sequence[tuple[str, nn.Parameter]]],
    stage: int,
    groups: ParallelGroups,
    *,
    bucket_size: int,
    zero_stage: int,
) -> list[Bucket]:
    """Fill buckets of about ``bucket_size`` elements with parameters of the same kind, the last registered first.

    Backward finishes the last layers first, so that the first buckets are complete first. ``units`` are the named
    parameters of the stage's units (embedding, each layer, head); at ``zero_stage`` 3, where a unit is gathered and
    freed as a whole, no bucket crosses the border of one.
    """
    open_: dict[BucketKind, list[tuple[str, nn.Parameter]]] = {}
    buckets: list[Bucket] = []

    def close(kind: BucketKind) -> None:
        group = groups.group("-".join(kind.replica_axes))
        buckets.append(Bucket(open_.pop(kind), kind, stage, group, zero_stage))

    for unit in reversed(list(units)):
        for name, parameter in reversed([pair for pair in unit if pair[1].requires_grad]):
            kind = BucketKind.of(parameter, groups)
            open_.setdefault(kind, []).append((name, parameter))
            if sum(p.numel() for _, p in open_[kind]) >= bucket_size:
                close(kind)
        for kind in list(open_) if zero_stage == 3 else ():
            close(kind)
    for kind in list(open_):
        close(kind)
    return buckets
