"""Messages rounded in blocks, as in ZeRO++ (Wang et al. 2023): weights in 8 bits, gradients in 4 bits.

A block of 256 numbers x is sent as q = clamp(round(x / s), -2^(b-1), 2^(b-1) - 1) in b bits, with the step
s = 2 max|x| / 2^b in float32. Errors are not kept: each message is rounded once, and sums are float32.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.data_parallel.compressor import Compressor
from megatron_core.parallel.collectives import all_gather_flat_, start_all_to_all_rows
from megatron_core.parallel.groups import Group
from megatron_core.parallel.handles import Handle

BLOCK = 256


def encode_blocks(flat: Tensor, bits: int) -> Tensor:
    """Return the bytes of a message: numbers in ``bits`` bits (4 or 8), then the steps."""
    blocks = pad(flat.float(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) * 2.0 ** (1 - bits)
    largest = 2 ** (bits - 1)
    # A step that is not finite makes the block not finite for the receiver.
    rounded = (blocks / torch.where(step == 0, 1.0, step)).round().clamp(-largest, largest - 1).nan_to_num()
    numbers = rounded.to(torch.int8).view(torch.uint8)
    if bits == 4:
        numbers = numbers[:, ::2] & 15 | numbers[:, 1::2] << 4
    return torch.cat([numbers.flatten()[: _bytes(flat.numel(), bits)], step.flatten().view(torch.uint8)])


def decode_blocks(message: Tensor, bits: int, count: int) -> Tensor:
    """Return the ``count`` numbers of a message of ``encode_blocks``, float32."""
    numbers, step = message.tensor_split([_bytes(count, bits)])
    if bits == 4:
        # The sign bit of each half moves to the top of a byte, from where a shift of int8 repeats it.
        numbers = torch.stack([numbers << 4, numbers & 240], dim=-1).view(torch.int8) >> 4
    rounded = pad(numbers.view(torch.int8).flatten(), (0, -numbers.numel() % BLOCK)).view(-1, BLOCK).float()
    return (rounded * step.clone().view(torch.float32)[:, None]).flatten()[:count]


def _bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


class BlockMessages(Compressor):
    """Sums gradients that are sent in 4 bits, and gathers weights at ZeRO 3 in 8 bits."""

    def __init__(self, *, gradients: bool, weights: bool) -> None:
        super().__init__()
        self._rounds_gradients = gradients
        if weights:
            self.start_gather = start_gather

    def is_active(self) -> bool:
        """Whether gradients are rounded."""
        return self._rounds_gradients

    def reduce_(self, bucket: Bucket) -> Iterator[Handle]:
        """Replace this rank's share of ``bucket.grads`` by the sum; without ZeRO all shares, gathered in 8 bits."""
        group = bucket.dp_group
        shares = bucket.grads.view(group.size(), -1)
        rows = torch.stack([encode_blocks(share, 4) for share in shares])
        received, handle = start_all_to_all_rows(rows, [1] * len(rows), [1] * len(rows), group)
        bucket.wire_bytes += rows.nbytes
        yield handle
        total = torch.stack([decode_blocks(row, 4, shares.shape[1]) for row in received]).sum(0)
        if bucket.is_sharded:
            shares[group.rank()] = total
            return
        summed = encode_blocks(total, 8)
        gathered = summed.new_empty(len(rows) * summed.numel())
        handle = all_gather_flat_(gathered, summed, group, async_op=True)
        bucket.wire_bytes += summed.nbytes
        yield handle
        for share, row in zip(shares, gathered.view(len(rows), -1), strict=True):
            share.copy_(decode_blocks(row, 8, shares.shape[1]))

    def commit(self, factor: float, limit: float) -> None:
        """Do nothing: no errors are kept."""

    def discard(self) -> None:
        """Do nothing: no errors are kept."""


class ArrivingWeights:
    """Handle of a gather; ``wait`` writes the received numbers to ``weights``."""

    def __init__(self, work: Handle, messages: Tensor, weights: Tensor) -> None:
        self._work = work
        self._messages = messages
        self._weights = weights

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for all shards; each rank has rounded weights, also of its own shard."""
        self._work.wait()
        shares = self._weights.view(len(self._messages), -1)
        for share, message in zip(shares, self._messages, strict=True):
            share.copy_(decode_blocks(message, 8, share.numel()))


def start_gather(
    weights: Tensor, shard: Tensor, spans: Sequence[object], parameters: Sequence[object], group: Group
) -> tuple[ArrivingWeights, int]:
    """Gather in 8 bits; see ``data_parallel.settings.StartGather``."""
    message = encode_blocks(shard, 8)
    messages = message.new_empty(group.size(), message.numel())
    work = all_gather_flat_(messages.view(-1), message, group, async_op=True)
    return ArrivingWeights(work, messages, weights), message.nbytes
