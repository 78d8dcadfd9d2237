"""What apex's and Transformer Engine's rotary kernels have in common: ``[s, b, h, d]``, one table for all sequences."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_ELEMENTS = 2**31 - 1
"""What their 32-bit offsets reach."""


def fits(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether every sequence has the same positions, offsets into ``x``, as it lies in memory, have 32 bits, and nobody
    wants gradients of the tables."""
    positions = cos.dim() - 1
    if positions not in (1, 2) or not 0 < x.dim() - positions <= 3 or cos.shape[0] != x.shape[0]:
        return False
    if cos.requires_grad or sin.requires_grad:
        return False
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return cos.shape[1:-1] in ((), (1,)) and 0 < x.numel() <= MOST_ELEMENTS and reach < MOST_ELEMENTS


def four_dims(x: Tensor, cos: Tensor) -> Tensor:
    """``x`` ``[s, b, ..., d]``, or without b where ``cos`` has no dim for it, as ``[s, b, h, d]``; a view where strides
    allow it."""
    x = x if cos.dim() == 3 else x.unsqueeze(1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def for_each_channel(table: Tensor, interleaved: bool = False) -> Tensor:
    """A table ``[s, 1, r/2]`` or ``[s, r/2]`` as ``[s, 1, 1, r]``, where every channel of a pair has its entry."""
    table = table.reshape(len(table), 1, 1, -1)
    return table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)
