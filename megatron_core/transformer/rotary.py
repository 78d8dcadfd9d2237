"""Rotary positions: channel i and channel i + r/2 turn by position * base^(-2i/r) (Su et al. 2021, section 3.4.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(
    position_ids: Tensor, rotated_channels: int, base: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[s, b, 1, rotated_channels]`` of the positions ``[b, s]``; b = 1 serves any batch.

    Computed in float64, so that long positions lose nothing, and cast to ``dtype`` here, once for all layers.
    """
    exponents = torch.arange(0, rotated_channels, 2, dtype=torch.float64, device=position_ids.device)
    frequencies = base ** -(exponents / rotated_channels)
    angles = position_ids.t().to(torch.float64)[:, :, None, None] * frequencies
    cos, sin = (torch.cat([half, half], dim=-1).to(dtype) for half in (angles.cos(), angles.sin()))
    return cos, sin


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first channels of ``x`` ``[s, b, heads, d]`` by the table's angles; further channels pass."""
    cos, sin = (t.to(x.dtype) for t in table)
    turned, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned
