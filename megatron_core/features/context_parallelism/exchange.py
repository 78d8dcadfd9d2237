"""Exchange of keys and values between ranks, and of their gradients in backward; exchange of heads for tokens."""

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from megatron_core.parallel.collectives import (
    Done,
    Handle,
    exchange_parts,
    start_gather_sequence,
    start_reduce_scatter_sequence,
    start_ring_shift,
)
from megatron_core.parallel.groups import ALONE, ContextGroups, Group


class Exchange(Protocol):
    """Passes the blocks of all ranks of a group to each rank, its own block first; all blocks have the same shape."""

    group: Group

    def forward(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its block); a block must be read before the next one is requested."""
        ...

    def backward(self, local: Tensor, gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return the gradient of this rank's block ``local``, summed over all ranks.

        ``gradient_of(rank, block)`` returns this rank's contribution to the gradient of another rank's block.
        """
        ...


class AllGatherExchange:
    """Gathers all blocks at once. A rank receives (p-1)/p of all bytes in forward and the same again in backward, and
    sends the same number of elements of gradients. Source: Dubey et al. 2024 (Llama 3), section 3.3.2."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def forward(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """As ``Exchange``."""
        blocks, handle = start_gather_sequence(local.unsqueeze(0), self.group)
        handle.wait()
        yield from ((rank, blocks[rank]) for rank in _from_own(self.group))

    def backward(self, local: Tensor, gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """As ``Exchange``; blocks are gathered again, so that no rank stores the whole sequence after forward."""
        # The blocks begin with this rank's own; the reduce-scatter needs them in the order of ranks.
        contributions = {rank: gradient_of(rank, block) for rank, block in self.forward(local)}
        gradients = torch.stack([contributions[rank] for rank in range(self.group.size())])
        total, handle = start_reduce_scatter_sequence(gradients, self.group)
        handle.wait()
        return total[0]


class RingExchange:
    """Sends blocks from each rank to the next, overlapped with the computation on the previous block.

    In forward a rank sends p-1 blocks; in backward it sends p-1 blocks and p gradients. The gradient of a block follows
    the block around the ring, accumulates each rank's contribution, and is sent one step further to the owning rank.
    Source: Liu et al. 2023, algorithm 1.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def forward(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """As ``Exchange``."""
        block = local
        ranks = _from_own(self.group)
        # A block is sent on before it is used: sending only reads it.
        for rank in ranks[:-1]:
            coming, handle = start_ring_shift(block, self.group)
            yield rank, block
            handle.wait()
            block = coming
        yield ranks[-1], block

    def backward(self, local: Tensor, gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """As ``Exchange``."""
        total: Tensor | None = None
        handle: Handle = Done()
        for rank, block in self.forward(local):
            contribution = gradient_of(rank, block)
            # Computed first, so that the message with the sum of the other ranks travels during the computation.
            if total is not None:
                handle.wait()  # for the sum of the preceding ranks' contributions
                contribution += total
            total, handle = start_ring_shift(contribution, self.group)
        assert total is not None, "a ring has at least one rank"
        handle.wait()
        return total


def _from_own(group: Group) -> list[int]:
    """The ranks of a group in the order in which a ring delivers their blocks: this rank, the previous one, ..."""
    return [(group.rank() - step) % group.size() for step in range(group.size())]


# Heads are independent, so each rank computes its own without exchanging keys: four all-to-alls for a layer instead of
# a ring (Jacobs et al. 2023).
class HeadExchange:
    """Exchanges heads within ``group``, whose ranks are adjacent in a context-parallel group of ``cp_size`` ranks.

    Adjacent ranks of a zig-zag hold adjacent chunks of the sequence: together these are the two chunks of one rank of a
    zig-zag over cp_size / size ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[n, b, heads, d]``, ``[n, b, groups, d]`` and ``[n, b, groups, e]`` -> ``[n size, b, heads / size, d]`` and
        the corresponding key-value heads; tokens in ascending order. Uses one message."""
        size = self.group.size()
        # Each rank needs whole key-value heads; copies of them are sent when there are fewer than ranks, and their
        # gradients are added by the backward of the repetition.
        copies = math.lcm(key.shape[2], size) // key.shape[2]
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
        projections = [tensor.unflatten(2, (size, -1)) for tensor in (query, key, value)]
        shapes = [x.shape[3:] for x in projections]
        # One message instead of three: small ones are bound by latency.
        mixed = exchange_parts(torch.cat([x.flatten(3) for x in projections], dim=3).movedim(2, 0), self.group)
        local_heads = self._ascending(mixed).split([shape.numel() for shape in shapes], dim=2)
        query, key, value = (tensor.unflatten(2, shape) for tensor, shape in zip(local_heads, shapes, strict=True))
        return query, key, value

    def to_sequence(self, out: Tensor) -> Tensor:
        """The inverse of ``to_heads`` for outputs: ``[n size, b, heads / size * d]`` -> ``[n, b, heads * d]``."""
        by_rank = self._by_rank(out)
        return exchange_parts(by_rank, self.group).movedim(0, 2).flatten(2)

    def _ascending(self, by_rank: Tensor) -> Tensor:
        """``[size, n, ...]``, the tokens of each rank -> ``[size n, ...]`` in ascending order: the first chunks in the
        order of ranks, the second chunks in reverse order."""
        # A zig-zag gives rank r the chunks r and 2 p - 1 - r.
        first, second = by_rank.chunk(2, dim=1)
        return torch.cat([first.flatten(0, 1), second.flip(0).flatten(0, 1)])

    def _by_rank(self, tokens: Tensor) -> Tensor:
        """The inverse of ``_ascending``."""
        first, second = (half.unflatten(0, (self.group.size(), -1)) for half in tokens.chunk(2))
        return torch.cat([first, second.flip(0)], dim=1)


def exchanges_of(comm_type: str, groups: ContextGroups) -> tuple[Exchange, Group | None]:
    """The exchange of keys and values for a kind of --cp-comm-type, and the ranks that exchange heads, if any."""
    heads = {"a2a": groups.whole, "a2a+p2p": groups.heads}.get(comm_type)
    # An all-to-all gives a rank longer parts of the sequence: whole ones, or those of a ring.
    ring = {"a2a": ALONE, "a2a+p2p": groups.ring}.get(comm_type, groups.whole)
    return AllGatherExchange(ring) if comm_type == "all_gather" else RingExchange(ring), heads
