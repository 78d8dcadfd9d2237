"""Exchange of keys and values between ranks, and of their gradients in backward."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from megatron_core.parallel.collectives import (
    Done,
    Handle,
    start_gather_sequence,
    start_reduce_scatter_sequence,
    start_ring_shift,
)
from megatron_core.parallel.groups import Group


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
