"""Rotary positions: channel i and channel i + r/2 turn by position * base^(-2i/r) (Su et al. 2021, section 3.4.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(
    length: int, rotated_channels: int, base: float, *, offset: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[length, 1, 1, rotated_channels]`` of the positions ``offset ... offset + length - 1``.

    Computed in float64, so that long positions lose nothing; ``rotate`` casts to its input's dtype.
    """
    exponents = torch.arange(0, rotated_channels, 2, dtype=torch.float64, device=device) / rotated_channels
    positions = torch.arange(offset, offset + length, dtype=torch.float64, device=device)
    angles = torch.outer(positions, base**-exponents)
    angles = torch.cat([angles, angles], dim=-1)[:, None, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first channels of ``x`` ``[s, b, heads, d]`` by the table's angles; further channels pass."""
    cos, sin = (t.to(x.dtype) for t in table)
    turned, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned
