"""Mixing of the hidden states of earlier depths of multi-token prediction (``--mtp-hsm``)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops.reference import uniform
from megatron_core.parallel.collectives import gather_from_sequence
from megatron_core.parallel.initialization import name_seed
from megatron_core.transformer.context import LayerContext, SequenceContext


@dataclass
class HiddenStateMixing:
    """The input of each depth: for each token the newest hidden state, or the one of an earlier depth.

    h_j of position i + k - j and h_k of position i predict the same token; depth k + 1 receives one of h_0, ..., h_k,
    drawn uniformly for each token, and h_k if the position is after the end of the document. The draw is a function of
    (seed, depth, sample, position).
    Source: Megatron Core, ``MultiTokenPredictionBlock`` with ``mtp_hsm``, which draws from generators of ranks.
    """

    context: LayerContext
    earlier: list[Tensor] = field(default_factory=list)
    """The hidden states of earlier depths, shifted to the positions of the next depth."""

    def input_of(self, depth: int, newest: Tensor, context: SequenceContext) -> Tensor:
        """Return the input of ``depth`` = 0, 1, ...; ``newest``: the output of the depth before, ``[s, b, h]``."""
        positions = context.residual_positions
        if positions is None or context.sample_index is None:
            raise ConfigError("mtp_hsm=True needs sample_index: pass the batch's global sample numbers to forward")
        self.earlier = [self._next_positions(hidden, positions) for hidden in self.earlier]
        mixed = newest
        key = name_seed(self.context.seed, f"mixing:mtp.{depth}")
        drawn = uniform((*newest.shape[:2], 1), key, context.sample_index, positions)
        drawn = (drawn * (depth + 1)).long()
        for number, hidden in enumerate(self.earlier):
            is_inside = _has_token_ahead(depth - number, positions, self._length(newest), context)
            mixed = torch.where((drawn == number) & is_inside, hidden, mixed)
        self.earlier.append(newest)
        return mixed

    def _length(self, hidden: Tensor) -> int:
        split = self.context.split
        return len(hidden) * split.cp_size * (split.tp_size if split.sequence_parallel else 1)

    def _next_positions(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """``hidden`` ``[s, b, h]`` of the positions after this rank's; any value after the end of the sequence."""
        split = self.context.split
        # This rank's tokens are one or two runs of positions: with context parallelism an early and a late chunk.
        before = split.tp_rank * len(hidden) if split.sequence_parallel else 0
        middle = self._length(hidden) // split.cp_size // 2 - before
        has_two_runs = split.cp_size > 1 and 0 < middle < len(hidden)
        starts = [0, middle if has_two_runs else 0]  # as many on each rank
        firsts, first_positions = hidden[starts], positions[starts]
        for group in (self.context.tp_group,) * split.sequence_parallel + (self.context.cp.whole,):
            firsts, first_positions = (gather_from_sequence(x, group) for x in (firsts, first_positions))
        shifted = hidden.roll(-1, 0)
        ends = sorted({-1, starts[1] - 1})
        sources = (first_positions == positions[ends, None] + 1).int().argmax(dim=1)
        return shifted.index_copy(0, torch.tensor(ends, device=hidden.device) % len(hidden), firsts[sources])


def _has_token_ahead(ahead: int, positions: Tensor, length: int, context: SequenceContext) -> Tensor:
    """``[s, b, 1]`` or ``[s, 1, 1]``: whether the token ``ahead`` positions later is in the same document."""
    later = positions + ahead
    is_inside = (later < length)[:, None]
    if context.documents is not None:
        ages = context.documents.ages[:, later.clamp(max=length - 1)].T
        is_inside = is_inside & (ages >= ahead)
    return is_inside.unsqueeze(-1)
