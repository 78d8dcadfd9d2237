"""How the keys and values of all ranks come to each of them, and their gradients back."""

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
    """Shows each rank of a group the blocks of all ranks, its own first; a block is any tensor, of one shape."""

    group: Group

    def forward(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Pairs (rank, its block); a block must be read before the next one is asked for."""
        ...

    def backward(self, own: Tensor, gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The sum, over all ranks, of their gradients of this rank's block ``own``.

        ``gradient_of(rank, block)`` gives this rank's part of the gradient of any rank's block.
        """
        ...


class AllGather:
    """All blocks at once: (p-1)/p of all bytes received forward, as many again backward and as many of gradients sent
    back. Source: Dubey et al. 2024 (Llama 3), section 3.3.2."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def forward(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """As ``Exchange``."""
        blocks, handle = start_gather_sequence(own.unsqueeze(0), self.group)
        handle.wait()
        yield from ((rank, blocks[rank]) for rank in _from_own(self.group))

    def backward(self, own: Tensor, gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """As ``Exchange``; blocks are gathered again, so that no rank keeps the whole sequence from the forward on."""
        found = {rank: gradient_of(rank, block) for rank, block in self.forward(own)}
        gradients = torch.stack([found[rank] for rank in range(self.group.size())])
        total, handle = start_reduce_scatter_sequence(gradients, self.group)
        handle.wait()
        return total[0]


class Ring:
    """Blocks travel from each rank to the next, while what has arrived is computed with.

    Forward a rank sends p-1 blocks; backward as many, and p gradients: that of a block follows it around the ring,
    growing, and one step further, home. Source: Liu et al. 2023, algorithm 1.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def forward(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """As ``Exchange``."""
        block, ranks = own, _from_own(self.group)
        for rank in ranks[:-1]:
            coming, handle = start_ring_shift(block, self.group)
            yield rank, block
            handle.wait()
            block = coming
        yield ranks[-1], block

    def backward(self, own: Tensor, gradient_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """As ``Exchange``."""
        total: Tensor | None = None
        handle: Handle = Done()
        for rank, block in self.forward(own):
            part = gradient_of(rank, block)
            if total is not None:
                handle.wait()  # what the ranks before have added
                part += total
            total, handle = start_ring_shift(part, self.group)
        assert total is not None, "a ring has one rank at least"
        handle.wait()
        return total


def _from_own(group: Group) -> list[int]:
    """The ranks of a group in the order in which a ring brings their blocks: the own one, the one before it, ..."""
    return [(group.rank() - step) % group.size() for step in range(group.size())]
