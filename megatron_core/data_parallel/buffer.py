"""Parameters and gradients of a stage in flat buffers."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megatron_core.data_parallel.awaited_parameter import Arrival
from megatron_core.data_parallel.bucket_layout import BucketLayout
from megatron_core.data_parallel.compressor import Compressor
from megatron_core.data_parallel.memory import BucketMemory, Placement, TransferHandle
from megatron_core.data_parallel.settings import BucketKind, DataParallelSettings, StartGather
from megatron_core.data_parallel.split_parameter import FreedWeights, acquire, release
from megatron_core.parallel.collectives import (
    Done,
    Handle,
    all_gather_flat_,
    all_reduce_,
    reduce_scatter_flat_,
    reduce_scatter_wide_,
)
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.parallel.meter import COMPRESSED, METER
from megatron_core.parallel.poison import poison_outside
from megatron_core.parallel.sharding import spec_of


class Bucket:
    """Parameters in one contiguous flat buffer, and their gradients in another.

    ``parameter.data`` becomes a view of ``weights`` and ``parameter.main_grad`` a view of ``grads`` (float32 for 16-bit
    weights; none if frozen). This rank updates ``shard``: its shard, or at ``zero_stage`` 0 the
    whole bucket. From stage 2 on ``grads`` has memory only between ``open_grads`` and the end of a reduction, which
    adds to ``grad_shard``; at stage 3 ``weights`` only between ``start_gather`` and ``release_weights``.

    The bucket is sharded over the ranks of ``dp_group``; ``instances`` are the ranks with the same shard in other
    copies of the model (hybrid sharding).
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        layout: BucketLayout,
        kind: BucketKind,
        settings: DataParallelSettings,
        memory: BucketMemory,
        *,
        stage: int,
        unit: int,
        dp_group: Group,
        instances: Group,
    ) -> None:
        self.names = [n for n, _ in named]
        self.parameters = [p for _, p in named]
        self.kind = kind
        self.stage = stage
        self.unit = unit
        self.dp_group = dp_group
        self.instances = instances
        self.is_sharded = settings.zero_stage > 0
        first = self.parameters[0]
        device = memory.device or first.device
        # Flat buffers for weights and gradients; parameters become views of them.
        # The end is padded so that the shards of all ranks are equal in size and aligned to 16 bytes.
        padded = layout.padded
        size = padded // dp_group.size()
        self.shard = (
            slice(dp_group.rank() * size, (dp_group.rank() + 1) * size) if self.is_sharded else slice(0, padded)
        )
        # Gradients of many micro-batches and ranks are added: in 16 bits small ones would be lost.
        final_dtype = torch.promote_types(first.dtype, torch.float32)
        grad_dtype = torch.float64 if settings.arithmetic.adds_exactly else final_dtype
        self.weights = torch.zeros(padded, dtype=first.dtype, device=device)
        self.placement = Placement(device) if kind.persistent else memory.placement_of(self.weights)
        """Placement of the shard of stage 3."""
        # The only rank of a group keeps its gradients whole, and its weights too unless they are offloaded.
        self.splits_grads = settings.zero_stage >= 2 and dp_group.size() > 1 and first.requires_grad
        shards_weights = settings.zero_stage >= 3 and not kind.persistent
        self.splits_weights = shards_weights and (dp_group.size() > 1 or self.placement.is_offloaded)
        # Gradients of stage 2 get their memory, and their zeros, in ``open_grads``.
        make = torch.empty if self.splits_grads else torch.zeros
        self.grads = make(padded * first.requires_grad, dtype=grad_dtype, device=device)
        self.offsets = layout.offsets
        self.end = layout.end
        self.used = layout.used
        for (name, parameter), offset in zip(named, self.offsets, strict=True):
            span = slice(offset, offset + parameter.numel())
            # Views instead of copies: layers, hooks and checkpoints keep using the parameter objects.
            memory.adopt(name, parameter, self.weights[span].view_as(parameter))
            if parameter.requires_grad:
                parameter.main_grad = self.grads[span].view_as(parameter)
        # From stages 2 and 3 on, keep only shards.
        self._weight_shard: Tensor | None = None
        if self.splits_weights:
            self._weight_shard = self.placement.tensor("weights", size, first.dtype).copy_(self.weights[self.shard])
            self.freed = FreedWeights(self.weights, self.parameters, self.names, dp_group.size())
            self.freed.release()
            self.placement.evict()
        self._grad_shard = self.grads.new_zeros(size) if self.splits_grads else None
        if self.splits_grads:
            release(self.grads)
        self._final_shard: Tensor | None = None
        if settings.arithmetic.adds_exactly and first.requires_grad:
            self._final_shard = self.grads.new_empty(self.sum_shard.shape, dtype=final_dtype)
        self._prepare_sums(settings, grad_dtype)

    def _prepare_sums(self, settings: DataParallelSettings, grad_dtype: torch.dtype) -> None:
        """Set the options and the state of the communication."""
        self.wire_dtype = settings.wire_dtype or grad_dtype
        """Dtype in which gradients are sent and summed over the ranks."""
        self.sums_wide = settings.sums_wide
        """Whether gradients sent in ``wire_dtype`` are summed in the dtype of ``grads``; only for shards."""
        self.compressor: Compressor | None = None
        self.model_group: Group = LocalGroup()
        """Ranks with the other shards, or copies, of the same parameters along the model axes."""
        self.wire_bytes = 0
        """Total bytes that this rank has sent for gradient sums."""
        self.gathered_bytes = 0
        """Total bytes of weights that this rank has sent."""
        self._reducing: Handle = Done()
        self._compressing: Iterator[Handle] | None = None
        self._wire: Tensor | None = None
        self._partial: Tensor | None = None
        self._has_sum = False
        self.gathering: Handle | Arrival = Done()
        self._fetched: tuple[Tensor, TransferHandle] | None = None
        """This rank's weights in transfer from ``placement``, until they have been gathered."""
        self.reduced = False

    def name_of(self, parameter: nn.Parameter) -> str:
        """The name of one of the bucket's parameters."""
        return next(name for name, candidate in zip(self.names, self.parameters, strict=True) if candidate is parameter)

    @property
    def is_writer(self) -> bool:
        """Whether this rank's ``shard`` counts in sums over all ranks: true for the first of several equal copies."""
        return (self.is_sharded or self.dp_group.rank() == 0) and self.instances.rank() == 0

    @property
    def saved_span(self) -> slice:
        """Part of the bucket that this rank saves: each of n ranks with the same shard saves 1 / n of it."""
        # Each element is saved once, and the writing is divided among the ranks that have it.
        copies = self.instances.size()
        index = self.instances.rank()
        if not self.is_sharded:
            copies = copies * self.dp_group.size()
            index = index * self.dp_group.size() + self.dp_group.rank()
        first = self.shard.start
        length = self.shard.stop - self.shard.start
        return slice(first + length * index // copies, first + length * (index + 1) // copies)

    @property
    def is_whole(self) -> bool:
        """Whether the weights have memory."""
        return self.weights.untyped_storage().nbytes() > 0

    @property
    def has_grads(self) -> bool:
        """Whether the unreduced gradients have memory."""
        return self.grads.untyped_storage().nbytes() > 0

    @property
    def is_reducing(self) -> bool:
        """Whether a sum has started and is not finished."""
        return self._wire is not None

    @property
    def compresses(self) -> bool:
        """Whether the gradients of this step are compressed.

        At stages 2 and 3 they then keep their memory until the last micro-batch: one message is sent per step.
        """
        return self.compressor is not None and self.compressor.is_active() and self.dp_group.size() > 1

    @property
    def completes_shard(self) -> bool:
        """Whether partial gradients are summed over model axes after the data-parallel sum, on the shard alone."""
        return self.splits_grads and not self.compresses

    @property
    def weight_shard(self) -> Tensor:
        """This rank's shard of the weights."""
        return self.weights[self.shard] if self._weight_shard is None else self._weight_shard

    @property
    def sum_shard(self) -> Tensor:
        """This rank's shard of the sums of gradients; complete after the reduction."""
        return self.grads[self.shard] if self._grad_shard is None else self._grad_shard

    @property
    def grad_shard(self) -> Tensor:
        """This rank's shard of the gradients: ``sum_shard`` itself, or with exact sums the result of ``round_sum``."""
        return self.sum_shard if self._final_shard is None else self._final_shard

    def round_sum(self) -> None:
        """Round complete exact sums to the dtype of the gradients."""
        # Exact sums are float64 and are rounded once: a rounding per micro-batch would depend on the layout.
        if self._final_shard is not None:
            self._final_shard.copy_(self.sum_shard)

    @property
    def cuts_parameters(self) -> bool:
        """Whether a parameter is split over several shards."""
        size = self.weights.numel() // self.dp_group.size()
        ends = ((start, start + p.numel() - 1) for start, p in zip(self.offsets, self.parameters, strict=True))
        return self.is_sharded and any(first // size != final // size for first, final in ends)

    def open_grads(self) -> None:
        """Allocate the gradients as zeros if they have no memory; first finish a pending reduction."""
        # The memory of the last micro-batch's gradients is still being sent.
        if self._wire is not None and self.splits_grads:
            self.finish_reduce()
        if not self.has_grads:
            acquire(self.grads)
            self.grads.zero_()

    def start_reduce(self) -> None:
        """Start to sum the gradients over the data-parallel ranks."""
        self.reduced = True
        if self.dp_group.size() == 1:
            self._has_sum = True
            return
        if self.compressor is not None and self.compresses:
            self._wire = self.grads
            self._partial = self.grads[self.shard] if self.is_sharded else None
            self._compressing = self.compressor.reduce_(self)
            self.continue_reduce()
            return
        # Without a copy if both dtypes are equal.
        wire = self._wire = self.grads.to(self.wire_dtype)
        self.wire_bytes += wire.nbytes
        if self.is_sharded:
            # The first sum of a step can be received in place; later ones are added to it.
            direct = wire is self.grads and not self._has_sum
            like = self.sum_shard if self.sums_wide else wire
            self._partial = self.sum_shard if direct else like.new_empty(self.sum_shard.numel())
            # 16-bit messages with additions in float32: half of the bytes without a rounding for each rank.
            if self.sums_wide and wire is not self.grads:
                self._reducing = reduce_scatter_wide_(self._partial, wire, self.dp_group)
            else:
                self._reducing = reduce_scatter_flat_(self._partial, wire, self.dp_group, async_op=True)
        else:
            self._reducing = all_reduce_(wire, self.dp_group, async_op=True)

    def continue_reduce(self) -> bool:
        """Wait for the last message of a compressed sum and start the next one; return whether all have arrived."""
        if self._compressing is not None:
            self._reducing.wait()
            with METER.labelled(COMPRESSED):
                started = next(self._compressing, None)
            self._reducing = started or Done()
            self._compressing = None if started is None else self._compressing
        return self._compressing is None

    def finish_reduce(self) -> None:
        """Wait for the sums; if only a shard is kept, add to it and free the rest."""
        while not self.continue_reduce():
            pass
        self._reducing.wait()
        self._reducing = Done()
        if self._wire is not None:
            total = self._wire if self._partial is None else self._partial
            # Stages 2 and 3 sum each micro-batch; stages 0 and 1 sum the accumulated gradients once.
            if self._has_sum and self.splits_grads:
                self.sum_shard.add_(total)
            # Equal if the collective wrote into the shard itself.
            elif total.data_ptr() != self.sum_shard.data_ptr():
                self.sum_shard.copy_(total)
            self._wire = None
            self._partial = None
            self._has_sum = True
            if self.splits_grads:
                release(self.grads)
        if not self.splits_grads:
            # A debug mode: outside of the shard the gradients are this rank's own and must not be read.
            poison_outside(self.grads, self.shard)

    def sum_over_instances(self) -> None:
        """Sum the shard of this instance over the instances of hybrid sharding."""
        all_reduce_(self.sum_shard, self.instances)

    def start_gather(self) -> None:
        """Start to gather the other ranks' weights unless they are already in memory."""
        if self.splits_weights and not self.is_whole:
            self.freed.acquire()
            poison_outside(self.weights, slice(0, 0))
            weight_shard = self.own_weights()
            if self.dp_group.size() == 1:
                self.weights.copy_(weight_shard)
            self._gather(weight_shard)
            # Reads are allowed only when the weights have arrived.
            self.gathering = Arrival(self.gathering, self.freed.restore)
        elif self.is_sharded and not self.splits_weights:
            poison_outside(self.weights, self.shard)
            self._gather(self.weight_shard)

    def own_weights(self) -> Tensor:
        """Return this rank's shard on the device."""
        # Usually a read that was started while an earlier unit computed.
        self.prefetch_weights()
        if self._fetched is None:
            return self.weight_shard
        self._fetched[1].wait()
        return self._fetched[0].to(self.weights.device, non_blocking=True)

    def _gather(self, weight_shard: Tensor) -> None:
        if self.dp_group.size() == 1:
            return
        if start := self._rounded_gather:
            spans = [piece[1:] for piece in self.pieces()]
            named = zip(self.offsets, self.parameters, strict=True)
            self.gathering, sent = start(self.weights, weight_shard, spans, list(named), self.dp_group)
        else:
            self.gathering = all_gather_flat_(self.weights, weight_shard, self.dp_group, async_op=True)
            sent = weight_shard.nbytes
        self.gathered_bytes += sent

    @property
    def _rounded_gather(self) -> StartGather | None:
        """Gathers fewer bits than the weights have, for layers that round their weights anyway."""
        return (self.compressor and self.compressor.start_gather) or self.kind.start_gather

    def gather_exactly(self) -> None:
        """Replace rounded gathered weights by exact ones, for readers other than layers."""
        if self._rounded_gather and self.dp_group.size() > 1:
            self.finish_gather()
            all_gather_flat_(self.weights, self.own_weights(), self.dp_group)
            self.finish_gather()

    def finish_gather(self) -> None:
        """Wait for the gathered weights, and free the memory of a shard that was read."""
        self.gathering.wait()
        self.gathering = Done()
        if self._fetched is not None:
            self._fetched[1].wait()
            self._fetched = None

    def prefetch_weights(self) -> None:
        """Start to read a shard that is on disk, or to copy a shard in host memory to the device."""
        if self.placement.is_offloaded and self._fetched is None:
            self._fetched = self.placement.fetch(self.weight_shard, self.weights.device)

    def release_weights(self) -> None:
        """Free the weights of stage 3 except the shard."""
        # The tensor objects stay and their storage is resized: the parameters are views of it.
        self.finish_gather()
        if self.splits_weights and self.is_whole:
            self.weights = self.freed.release()

    def keep_for_users(self) -> None:
        """When the whole weights are freed, keep their memory if tensors created from now on still use it."""
        self.freed.count_users()

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        (self.grads if self._grad_shard is None else self._grad_shard).zero_()
        self.reduced = self._has_sum = False

    def pieces(self, span: slice | None = None) -> Iterable[tuple[str, nn.Parameter, int, int, int]]:
        """Yield the parts of parameters in ``span``, by default this rank's shard.

        Each is a tuple of name, parameter, its first element, its end, and the offset in the span.
        """
        span = span or self.shard
        for name, parameter, offset in zip(self.names, self.parameters, self.offsets, strict=True):
            start = max(span.start - offset, 0)
            stop = min(span.stop - offset, parameter.numel())
            if start < stop:
                yield name, parameter, start, stop, offset + start - span.start

    def owned_ranges(self, *, every_copy: bool = False) -> list[tuple[int, int]]:
        """Ranges of the shard that count for this rank in a sum over all ranks; adjacent ranges are merged.

        ``every_copy``: each data-parallel rank counts its copy.
        """
        ranges: list[tuple[int, int]] = []
        for _, parameter, start, stop, offset in self.pieces() if self.is_writer or every_copy else ():
            for owned_start, owned_stop in spec_of(parameter).owned_flat_ranges():
                begin = max(owned_start, start) - start + offset
                end = min(owned_stop, stop) - start + offset
                if begin < end:
                    joined = ranges.pop()[0] if ranges and ranges[-1][1] == begin else begin
                    ranges.append((joined, end))
        return ranges
