"""Rotary positions: the channels of pair i turn by position * base^(-2i/r) (Su et al. 2021, section 3.4.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LLAMA3_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
"""Positions that Llama 3 was trained on, and in how many turns over them a channel is slow or fast (Llama 3.1)."""


def rotary_table(
    position_ids: Tensor,
    rotated_channels: int,
    base: float,
    dtype: torch.dtype = torch.float64,
    *,
    interpolation: float = 1.0,
    llama3_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[s, b, rotated_channels/2]`` of the positions ``[b, s]``; b = 1 stands for every sequence.

    ``interpolation`` divides the positions (Chen et al. 2023); ``llama3_factor`` is that of ``llama3_frequencies``.
    Computed in float64, so that long positions lose nothing, and cast to ``dtype`` here, once for all layers: it is the
    one that ``ops.rope`` wants for the activations'.
    """
    exponents = torch.arange(0, rotated_channels, 2, dtype=torch.float64, device=position_ids.device)
    frequencies = base ** -(exponents / rotated_channels) / interpolation
    if llama3_factor is not None:
        frequencies = llama3_frequencies(frequencies, llama3_factor)
    angles = position_ids.t().to(torch.float64)[:, :, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def llama3_frequencies(frequencies: Tensor, factor: float) -> Tensor:
    """f / factor for channels with less than one turn over 8192 positions, f for those with more than 4, and between
    them s f + (1 - s) f / factor with s = (turns - 1) / 3 (Llama 3.1)."""
    turns = LLAMA3_CONTEXT * frequencies / (2 * math.pi)
    share = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0)
    return share * frequencies + (1 - share) * frequencies / factor
