"""Rotary positions: the channels of pair i turn by position * base^(-2i/r) (Su et al. 2021, section 3.4.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(
    position_ids: Tensor, rotated_channels: int, base: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[s, b, rotated_channels/2]`` of the positions ``[b, s]``; b = 1 stands for every sequence.

    Computed in float64, so that long positions lose nothing, and cast to ``dtype`` here, once for all layers: it is the
    one that ``ops.rope`` wants for the activations'.
    """
    exponents = torch.arange(0, rotated_channels, 2, dtype=torch.float64, device=position_ids.device)
    frequencies = base ** -(exponents / rotated_channels)
    angles = position_ids.t().to(torch.float64)[:, :, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
