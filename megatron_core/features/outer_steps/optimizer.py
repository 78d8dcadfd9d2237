"""Global weights of groups of replicas that train independently and exchange their weights every few steps.

Groups send their outer gradients, exact or rounded. Rounded numbers have one scale for each tensor, its largest
absolute value in this group, so that they do not depend on how the tensor is split over the ranks of a group.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.features.averages.weights import replaced_weights
from megatron_core.features.lamb.whole_tensors import reduce_over_tensors
from megatron_core.features.outer_steps.settings import OuterConfig
from megatron_core.optimizer.clip import model_part_of
from megatron_core.optimizer.rule import write_copy
from megatron_core.optimizer.shard import Shard
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.handles import Handle
from megatron_core.parallel.meter import COMPRESSED, METER
from megatron_core.training.driver import gather_weights

LARGEST_E4M3 = 448.0


class GroupMessage:
    """The mean over the ranks of ``group`` of their flat tensors ``values``, which it may overwrite.

    ``exchange``: a value of ``outer_exchange``; ``lengths`` and ``largest`` (same dtype as ``values``) are the lengths
    of the parts of tensors in ``values`` and the largest absolute value of each of the whole tensors.
    """

    def __init__(self, values: Tensor, exchange: str, lengths: Sequence[int], largest: Tensor, group: Group) -> None:
        self._values = values
        self._kind = exchange
        self._lengths = list(lengths)
        self._group = group
        self._received: Tensor | None = None
        if exchange == "full":
            self._handle: Handle = all_reduce_(values, group, async_op=True)
            return
        encoded = values.bfloat16() if exchange == "bf16" else self._encoded(largest)
        self._received = encoded.new_empty(group.size() * encoded.numel())
        if group.size() == 1:
            self._received.copy_(encoded)
        with METER.labelled(COMPRESSED):
            self._handle = all_gather_flat_(self._received, encoded, group, async_op=True)

    def wait(self) -> Tensor:
        """Return the mean, when the messages of all ranks have arrived."""
        self._handle.wait()
        total = self._values
        if self._received is not None:
            rows = self._received.view(self._group.size(), -1)
            total = torch.zeros_like(self._values)
            for row in rows:
                total += row if self._kind == "bf16" else self._decoded(row)
        return total.div_(self._group.size())

    def _encoded(self, largest: Tensor) -> Tensor:
        """The scales as bytes, followed by the numbers relative to them."""
        relative = self._values / self._spread(largest).clamp_min(torch.finfo(largest.dtype).tiny)
        if self._kind == "fp8":
            codes = (relative * LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = packed_codes(to_e3m0(relative))
        return torch.cat([largest.view(torch.uint8), codes])

    def _decoded(self, row: Tensor) -> Tensor:
        size = len(self._lengths) * self._values.element_size()
        largest = row[:size].clone().view(self._values.dtype)
        codes = row[size:]
        if self._kind == "fp8":
            relative = codes.view(torch.float8_e4m3fn).to(largest.dtype) / LARGEST_E4M3
        else:
            relative = from_e3m0(unpacked(codes, self._values.numel()), largest.dtype)
        return relative * self._spread(largest)

    def _spread(self, largest: Tensor) -> Tensor:
        """The value of each tensor for each of its elements."""
        lengths = torch.tensor(self._lengths, dtype=torch.int64, device=largest.device)
        return largest.repeat_interleave(lengths, output_size=self._values.numel())


def to_e3m0(x: Tensor) -> Tensor:
    """Codes of the nearest of 0 and +-2^-6, ..., +-2^0 to each number of ``x``, uint8: 0 to 7, plus 8 if negative."""
    size = x.abs()
    exponent = torch.floor(torch.log2(size / 0.75)).clamp(-6, 0)  # 0.75 is half-way between 1/2 and 1
    code = torch.where(size < 2.0**-7, torch.zeros_like(size), exponent + 7).to(torch.uint8)
    return code + 8 * (x < 0).to(torch.uint8)


def from_e3m0(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``to_e3m0``."""
    powers = [0.0, *(2.0**exponent for exponent in range(-6, 1))]
    table = torch.tensor(powers + [-power for power in powers], dtype=dtype, device=codes.device)
    return table[codes.long()]


def packed_codes(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in each byte; an odd last one is followed by 0."""
    codes = torch.cat([codes, codes.new_zeros(len(codes) % 2)])
    return codes[::2] + 16 * codes[1::2]


def unpacked(data: Tensor, length: int) -> Tensor:
    """The inverse of ``packed_codes``, for ``length`` codes."""
    return torch.stack([data % 16, data // 16], 1).view(-1)[:length]


class FragmentPiece(NamedTuple):
    """A part of a parameter in the global weights of this rank."""

    shard: Shard
    name: str
    parameter: nn.Parameter
    start: int
    """First element of the parameter, and the end."""
    stop: int
    offset: int
    """Offset in the shard's main weights."""

    @property
    def main(self) -> Tensor:
        """This group's own weights."""
        return self.shard.main[self.offset : self.offset + self.stop - self.start]


@dataclass(eq=False)
class Fragment:
    """A part of the model that is exchanged at once: this rank's share of its global weights and their state, flat."""

    number: int
    pieces: list[FragmentPiece]
    buckets: list[Shard]
    """Shards with any of its parameters, on whatever rank, in one order on all ranks that share them."""
    weights: Tensor = field(init=False)
    """The global weights."""
    momentum: Tensor = field(init=False)
    mean: Tensor = field(init=False)
    """The mean of the groups' outer gradients, from the arrival of a message until it is applied; else empty."""
    message: GroupMessage | None = field(init=False, default=None)
    in_flight: bool = field(init=False, default=False)
    """Whether ``mean``, or the message that becomes it, is still to be applied."""
    sent: Tensor | None = field(init=False, default=None)
    """This group's outer gradient while its message is in flight, if the run copies its state before each step."""

    def own_weights(self) -> Tensor:
        """A copy of this group's weights."""
        weights = [piece.main for piece in self.pieces]
        return torch.cat(weights) if weights else self.weights.new_zeros(0)

    def parts(self, flat: Tensor) -> Iterator[tuple[FragmentPiece, Tensor]]:
        """Each piece with its part of ``flat``."""
        sizes = [piece.stop - piece.start for piece in self.pieces]
        return zip(self.pieces, flat.split(sizes) if sizes else (), strict=True)

    def arrive(self) -> None:
        """Wait for the message in flight, if there is one."""
        if self.message is not None:
            self.mean = self.message.wait()
            self.message = None


class OuterOptimizer:
    """SGD with Nesterov momentum on the global weights w of G groups, by fragments of the model (Douillard et al. 2023,
    algorithm 1, and 2025, algorithm 2).

    Every H steps d = sum over the groups of (w - w_g) / G is computed from their weights w_g, and after a delay
    m = mu m + d; w = w - lr (d + mu m); w_g = alpha w_g + (1 - alpha) w. The inner optimizers keep their state.

    Global weights and momentum are divided over the replicas of a group, whatever the ZeRO stage, so that each element
    is sent once by each group.
    """

    def __init__(
        self,
        config: OuterConfig,
        data: DataParallel,
        optimizer: Optimizer,
        groups: ParallelGroups,
        num_layers: int,
        *,
        keeps_sent: bool = False,
        number: int | None = None,
    ) -> None:
        """``keeps_sent``: keep sent outer gradients, to send them again after a failure; ``number``: of this group in
        the job, if other groups have been lost."""
        self.config = config
        self.groups = groups
        self._data = data
        self._optimizer = optimizer
        self.number = groups.outer.rank() if number is None else number
        self._num_layers = num_layers
        self._keeps_sent = keeps_sent
        self.fragments = [self._fragment(number) for number in range(config.outer_fragments)]
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Begin at this group's weights, which must be those of all groups."""
        for fragment in self.fragments:
            dtype = next((piece.main.dtype for piece in fragment.pieces), torch.float32)
            fragment.weights = torch.zeros(0, dtype=dtype, device=self._data.device)
            fragment.weights = fragment.own_weights()
            fragment.momentum, fragment.mean = torch.zeros_like(fragment.weights), fragment.weights.new_zeros(0)
            fragment.message = None
            fragment.in_flight = False
            fragment.sent = None

    @torch.no_grad()
    def start_from_global_weights(self) -> None:
        """Set this group's main weights to the global ones, and its outer gradients in flight to zero."""
        for shard in self._optimizer.shards:
            shard.main.copy_(self._global_weights(shard))
        for fragment in self.fragments:
            fragment.sent = None if fragment.sent is None else torch.zeros_like(fragment.sent)

    @property
    def nbytes(self) -> int:
        """Bytes of global weights and momentum."""
        return sum(fragment.weights.nbytes + fragment.momentum.nbytes for fragment in self.fragments)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Start the exchanges that are due after ``step``, counted from 1, and apply those that end with it."""
        with METER.phase("outer optimizer"):
            changed = [fragment for fragment in self.fragments if self._advance(fragment, step)]
            if changed:
                self._write(changed)

    def _advance(self, fragment: Fragment, step: int) -> bool:
        """Start or end the exchange of a fragment; return whether its global weights have changed."""
        if self.config.sent_at(fragment.number, step):
            gradient = fragment.weights - fragment.own_weights()
            fragment.sent = gradient.clone() if self._keeps_sent else None
            self.send(fragment, gradient)
        if not (fragment.in_flight and self.config.applied_at(fragment.number, step)):
            return False
        fragment.arrive()
        fragment.in_flight = False
        momentum = self.config.outer_momentum
        fragment.momentum.mul_(momentum).add_(fragment.mean)
        direction = fragment.mean.add(fragment.momentum, alpha=momentum)
        fragment.weights.sub_(direction, alpha=self.config.outer_lr)
        fragment.mean = fragment.mean.new_zeros(0)
        fragment.sent = None
        return True

    def send(self, fragment: Fragment, gradient: Tensor) -> None:
        """Start the exchange of this group's outer ``gradient``, whose memory is used; all groups call this."""
        largest = gradient.new_zeros(len(fragment.pieces))
        if self.config.outer_exchange in ("fp8", "fp4"):
            largest = self._largest(fragment, gradient)
        lengths = [piece.stop - piece.start for piece in fragment.pieces]
        fragment.message = GroupMessage(gradient, self.config.outer_exchange, lengths, largest, self.groups.outer)
        fragment.in_flight = True

    def _largest(self, fragment: Fragment, gradient: Tensor) -> Tensor:
        """The largest absolute value of each piece's whole tensor in this group."""
        parameters = {shard: shard.bucket.parameters for shard in fragment.buckets}
        maxima = {shard: gradient.new_zeros(len(p), dtype=torch.float64) for shard, p in parameters.items()}
        numbers = {shard: dict(zip(p, range(len(p)), strict=True)) for shard, p in parameters.items()}
        for piece, elements in fragment.parts(gradient):
            maxima[piece.shard][numbers[piece.shard][piece.parameter]] = elements.abs().max()
        for shard in fragment.buckets:
            all_reduce_(maxima[shard], shard.bucket.dp_group, maximum=True)
            reduce_over_tensors(shard.bucket, maxima[shard], self.groups, maximum=True)
        values = [maxima[piece.shard][numbers[piece.shard][piece.parameter]] for piece in fragment.pieces]
        return torch.stack(values).to(gradient.dtype) if values else gradient.new_zeros(0)

    def _write(self, fragments: list[Fragment]) -> None:
        """Mix the global weights of ``fragments`` into this group's weights."""
        self._optimizer.before_update()
        self._data.finish_param_sync()
        numbers = {fragment.number for fragment in fragments}
        for shard in self._optimizer.shards:
            global_weights = None
            for name, _, start, stop, offset in shard.bucket.pieces():
                if self._number_of(name) in numbers:
                    global_weights = self._global_weights(shard) if global_weights is None else global_weights
                    span = slice(offset, offset + stop - start)
                    shard.main[span] = torch.lerp(global_weights[span], shard.main[span], self.config.outer_alpha)
                    write_copy(shard.part(span))
        gather_weights([self._data])

    def _global_weights(self, shard: Shard) -> Tensor:
        """The global weights of a shard, gathered from the other replicas if they hold a part of them."""
        gathered = torch.zeros_like(shard.main)
        for fragment in self.fragments:
            for piece, elements in fragment.parts(fragment.weights):
                if piece.shard is shard:
                    gathered[piece.offset : piece.offset + elements.numel()] = elements
        if not shard.bucket.is_sharded:
            all_gather_flat_(gathered, gathered[own_span(shard.bucket)].clone(), shard.bucket.dp_group)
        return gathered

    def global_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the global weights; afterwards the group's own weights are restored.

        Collective calls of all ranks of a group.
        """
        return replaced_weights(self._data, self._optimizer, self._global_weights)

    def _fragment(self, number: int) -> Fragment:
        pieces = []
        shards = []
        for shard in self._optimizer.shards:
            bucket = shard.bucket
            span = own_span(shard.bucket)
            first = span.start - bucket.shard.start
            pieces += [
                FragmentPiece(shard, name, parameter, start, stop, first + offset)
                for name, parameter, start, stop, offset in bucket.pieces(span)
                if self._number_of(name) == number
            ]
            if any(self._number_of(name) == number for name in bucket.names):
                shards.append(shard)
        return Fragment(number, pieces, sorted(shards, key=lambda shard: not shard.bucket.kind.tied))

    def _number_of(self, name: str) -> int:
        """The fragment of a parameter: i mod P for layer i; the first for the embedding, the last for the head."""
        number = model_part_of(name, self._num_layers)
        final = self.config.outer_fragments - 1
        if number == 0:
            return 0
        return final if number > self._num_layers else (number - 1) % self.config.outer_fragments


def own_span(bucket: Bucket) -> slice:
    """The part of a bucket whose global weights this rank holds, also if it has the whole bucket."""
    size = bucket.weights.numel() // bucket.dp_group.size()
    return slice(bucket.dp_group.rank() * size, (bucket.dp_group.rank() + 1) * size)
