"""Parameters and gradients of a stage in flat buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core.parallel.collectives import Done, all_gather_flat_, all_reduce_, reduce_scatter_flat_
from megatron_core.parallel.groups import Group
from megatron_core.parallel.poison import poison_outside
from megatron_core.parallel.sharding import spec_of

SHARD_MULTIPLE = 8
"""Elements of which a shard has a whole multiple, so that each begins at 16 bytes, which kernels read at once."""


@dataclass(frozen=True)
class BucketKind:
    """What all parameters of a bucket have in common."""

    decay: bool
    """Whether weight decay applies: matrices and tables yes, biases and norms no."""
    partial: str | None
    """Over which axis gradients are still to be completed: ``tp`` (summed whole), ``kv`` (shared rows of a fused QKV
    matrix), ``tied`` (both ends of the pipeline), or None."""


def kind_of(parameter: nn.Parameter, tp_size: int) -> BucketKind:
    """The kind of bucket that a parameter belongs to."""
    spec = spec_of(parameter)
    partial = None
    if spec.tied:
        partial = "tied"
    elif tp_size > 1 and spec.partial_grad:
        partial = "tp"
    elif tp_size > 1 and spec.has_shared_ranges:
        partial = "kv"
    return BucketKind(decay=len(spec.global_shape) > 1, partial=partial)


class Bucket:
    """Parameters that lie one after another in one flat buffer, and their gradients in another.

    ``parameter.data`` becomes a view of ``weights`` and ``parameter.main_grad`` a view of ``grads`` (float32 for 16-bit
    weights). The end is padded so that the data-parallel ranks' shards are equal and begin at 16 bytes. With
    ``sharded`` this rank owns ``shard``, one of those parts; otherwise ``shard`` is the whole bucket.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        kind: BucketKind,
        stage: int,
        dp_group: Group,
        *,
        sharded: bool,
    ) -> None:
        self.names, self.parameters = [n for n, _ in named], [p for _, p in named]
        self.kind, self.stage, self.dp_group, self.sharded = kind, stage, dp_group, sharded
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
        self.shard = slice(dp_group.rank() * part, (dp_group.rank() + 1) * part) if sharded else slice(0, padded)
        self._reducing = Done()
        self.gathering = Done()
        self.reduced = False

    def _adopt(self, parameter: nn.Parameter, at: int) -> None:
        view = self.weights[at : at + parameter.numel()].view_as(parameter)
        view.copy_(parameter.data)
        parameter.data = view
        parameter.main_grad = self.grads[at : at + parameter.numel()].view_as(parameter)

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
        if self.sharded:
            self._reducing = reduce_scatter_flat_(self.grad_shard, self.grads, self.dp_group, async_op=True)
        else:
            self._reducing = all_reduce_(self.grads, self.dp_group, async_op=True)
        self.reduced = True

    def finish_reduce(self) -> None:
        """Wait until the sums are there."""
        self._reducing.wait()
        self._reducing = Done()
        poison_outside(self.grads, self.shard)

    def start_gather(self) -> None:
        """Begin to collect the other ranks' updated weights."""
        if self.sharded:
            poison_outside(self.weights, self.shard)
            self.gathering = all_gather_flat_(self.weights, self.weight_shard, self.dp_group, async_op=True)

    def finish_gather(self) -> None:
        """Wait until the weights are there."""
        self.gathering.wait()
        self.gathering = Done()

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        self.grads.zero_()
        self.reduced = False

    def pieces(self) -> Iterable[tuple[str, nn.Parameter, int, int, int]]:
        """What this rank's shard touches: name, parameter, its first and last element, their place in the shard."""
        for name, parameter, offset in zip(self.names, self.parameters, self.offsets, strict=True):
            start = max(self.shard.start - offset, 0)
            stop = min(self.shard.stop - offset, parameter.numel())
            if start < stop:
                yield name, parameter, start, stop, offset + start - self.shard.start

    def owned_ranges(self) -> list[tuple[int, int]]:
        """Ranges of the shard that count for this rank in a sum over all ranks, neighbours joined."""
        ranges: list[tuple[int, int]] = []
        for _, parameter, start, stop, at in self.pieces():
            row = parameter.numel() // parameter.shape[0] if parameter.dim() else 1
            for first, last in spec_of(parameter).owned_local():
                begin, end = max(first * row, start), min(last * row, stop)
                if begin >= end:
                    continue
                begin, end = begin - start + at, end - start + at
                if ranges and ranges[-1][1] == begin:
                    ranges[-1] = (ranges[-1][0], end)
                else:
                    ranges.append((begin, end))
        return ranges


def make_buckets(
    named: Iterable[tuple[str, nn.Parameter]],
    stage: int,
    dp_group: Group,
    *,
    tp_size: int,
    bucket_size: int,
    sharded: bool,
) -> list[Bucket]:
    """Fill buckets of about ``bucket_size`` elements with parameters of the same kind, the last registered first.

    Backward finishes the last layers first, so that the first buckets are complete first.
    """
    open_: dict[BucketKind, list[tuple[str, nn.Parameter]]] = {}
    buckets: list[Bucket] = []

    def close(kind: BucketKind) -> None:
        buckets.append(Bucket(open_.pop(kind), kind, stage, dp_group, sharded=sharded))

    for name, parameter in reversed(list(named)):
        if not parameter.requires_grad:
            continue
        kind = kind_of(parameter, tp_size)
        open_.setdefault(kind, []).append((name, parameter))
        if sum(p.numel() for _, p in open_[kind]) >= bucket_size:
            close(kind)
    for kind in list(open_):
        close(kind)
    return buckets
