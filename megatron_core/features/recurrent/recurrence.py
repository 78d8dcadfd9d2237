"""Parts of recurrences over tokens whose states decay: chunks of tokens, decays, and transitions of states."""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk, as in Megatron Core's gated delta net and flash-linear-attention."""


class Transition(NamedTuple):
    """The state after some tokens as a function of the state before them: S -> ``factor`` S + ``shift``."""

    factor: Tensor
    """``[b, heads, dk, dk]``, or ``[b, heads, 1, 1]`` for a number."""
    shift: Tensor
    """``[b, heads, dk, dv]``."""

    def apply(self, state: Tensor) -> Tensor:
        """The state after the tokens, ``[b, heads, dk, dv]``."""
        is_number = self.factor.shape[-1] == 1
        return (self.factor * state if is_number else self.factor @ state) + self.shift


class Decays(NamedTuple):
    """Factors of a state between the tokens of each chunk; 0 across the border of documents."""

    between: Tensor
    """``[b, heads, chunks, chunk, chunk, d]``: from the second token to the first one; 0 for later tokens."""
    start: Tensor
    """``[b, heads, chunks, chunk, d]``: from the state before the chunk to a token."""
    end: Tensor
    """``[b, heads, chunks, chunk, d]``: from a token to the end of the chunk."""


def split_in_chunks(x: Tensor, chunk: int) -> Tensor:
    """``[b, s, heads, d]`` -> ``[b, heads, chunks, chunk, d]``, filled up with tokens of 0, which change no state."""
    padding = -x.shape[1] % chunk
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x
    return x.transpose(1, 2).unflatten(2, (-1, chunk))


def _running_sum(x: Tensor) -> Tensor:
    """The sums along dim -2 up to each place.

    On GPUs torch has no deterministic ``cumsum`` of fractions; the product with a triangle of ones is deterministic.
    """
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x.new_ones(x.shape[-2], x.shape[-2]).tril() @ x
    return x.cumsum(-2)


def decays_in_chunks(decay: Tensor, first: Tensor | None) -> Decays:
    """Factors from the logarithms ``[b, heads, chunks, chunk, d]`` of the decays of tokens.

    ``first`` ``[b, s]``: True for tokens that start from a state of 0; None: no token does.
    """
    chunk = decay.shape[-2]
    total = _running_sum(decay)
    seen = torch.ones(chunk, chunk, dtype=torch.bool, device=decay.device).tril()
    from_start = to_end = None
    if first is not None:
        number = (
            split_in_chunks(first[:, :, None, None].long(), chunk).squeeze(-1).cumsum(-1)
        )  # of the document in the chunk
        seen = seen & (number.unsqueeze(-1) == number.unsqueeze(-2))
        from_start = number != 0
        to_end = number != number[..., -1:]
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(~seen.unsqueeze(-1), -torch.inf).exp()
    start, end = total.exp(), (total[..., -1:, :] - total).exp()
    if from_start is not None and to_end is not None:
        start = start.masked_fill(from_start.unsqueeze(-1), 0.0)
        end = end.masked_fill(to_end.unsqueeze(-1), 0.0)
    return Decays(between, start, end)
