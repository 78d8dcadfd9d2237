"""Softmax of attention scores."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """softmax(scale * scores) over the keys that ``mask``, the triangle and the window leave, 0 for the others.

    ``scores`` ``[..., queries, keys]``; ``mask`` broadcasts to it, True = masked.
    """
    hidden, (queries, keys) = mask, scores.shape[-2:]
    if causal or window is not None:
        hidden = _outside(queries, keys, window, scores.device)
        hidden = hidden if mask is None else hidden | mask
    if hidden is None:
        return (scores * scale).softmax(-1)
    probs = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    if mask is None and queries <= keys:
        return probs
    return probs.masked_fill(hidden, 0.0)  # a row that sees nothing is NaN so far


def _outside(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """``[queries, keys]``, True where the key is after the query or before its window; the last ones are at one
    place."""
    own = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(own)
    return ~(seen if window is None else seen.triu(own - window + 1))
