"""Rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs (a, b) of channels -> (a cos - b sin, b cos + a sin), in the tables' precision, and then as ``x`` has it;
    shapes as in ``ops.rope`` (Su et al. 2021, section 3.4.2)."""
    for _ in range(x.dim() - cos.dim()):
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = 2 * cos.shape[-1]
    turned, passed = x[..., :rotated], x[..., rotated:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned
