"""States of recurrences over sequences that are split over ranks in zig-zag order."""

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.features.recurrent.recurrence import Transition
from megatron_core.parallel.collectives import gather_from_sequence
from megatron_core.parallel.groups import Group


class StateExchange:
    """Passes what earlier tokens leave behind to the parts of sequences on this rank.

    A rank of c holds the parts r and 2c - 1 - r of each sequence (``parallel.micro_batch.zigzag``); a tensor of all
    parts on a rank is ``[parts b, ...]``, the first parts of all sequences before the second ones. The transitions of
    all parts are gathered at once, and each rank computes the states before its parts: the message has a fixed size,
    2 dk (dk + dv) elements per head and sequence, or 2 (1 + dk dv) if states have a number as factor, and no rank waits
    for the one before.
    Source: Sun et al. 2025 (arXiv 2502.07563, LASP-2), for linear attention.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        size = group.size()
        rank = group.rank()
        self.parts = 1 if size == 1 else 2
        """Number of parts of a sequence on a rank."""
        self._own = [0] if size == 1 else [rank, 2 * size - 1 - rank]
        pairs = [(owner, 2 * size - 1 - owner) for owner in range(size)]
        places = {number: 2 * owner + half for owner, pair in enumerate(pairs) for half, number in enumerate(pair)}
        self._order = [places[number] for number in range(2 * size)]

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        """Return the ``count`` tokens before each part of ``x`` ``[parts b, n, c]``; 0 before a sequence.

        Errors: ``LayoutError`` if a part has fewer tokens.
        """
        if self.group.size() == 1 or not count:
            return x.new_zeros(len(x), count, x.shape[2])
        if x.shape[1] < count:
            raise LayoutError(
                f"a convolution over {count + 1} tokens needs parts of {count} or more tokens, and context_parallel_"
                f"size={self.group.size()} leaves {x.shape[1]}; use a longer seq_length or fewer ranks"
            )
        ends = self._gathered(x[:, x.shape[1] - count :])
        before = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        return before[self._own].flatten(0, 1)

    def state_before(self, transition: Transition) -> Tensor:
        """Return the states before the parts on this rank, ``[parts b, heads, dk, dv]``; 0 before a sequence."""
        shapes = [x.shape[-2:] for x in transition]
        of_parts = self._gathered(torch.cat([x.flatten(-2) for x in transition], dim=-1))
        state = torch.zeros_like(transition.shift.unflatten(0, (self.parts, -1))[0])
        states = [state]
        for transition_of_part in of_parts[: self._own[-1]]:
            matrices = transition_of_part.split([shape.numel() for shape in shapes], dim=-1)
            state = Transition(*(x.unflatten(-1, shape) for x, shape in zip(matrices, shapes, strict=True))).apply(
                state
            )
            states.append(state)
        return torch.cat([states[number] for number in self._own])

    def _gathered(self, x: Tensor) -> Tensor:
        """``[parts b, ...]`` of each rank -> ``[all parts, b, ...]`` in the order of the sequence."""
        return gather_from_sequence(x.unflatten(0, (self.parts, -1)), self.group)[self._order]
