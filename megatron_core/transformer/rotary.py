"""Rotary embedding: rotate channel pair i by position * base^(-2i/r) (Su et al. 2021, section 3.4.2)."""

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.feature import load_hook


def rotary_table(
    position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float64, *, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return ``magnitude`` * cos and ``magnitude`` * sin of position * frequency, each ``[s, b, r/2]``.

    ``position_ids`` is ``[b, s]``, where b = 1 applies to every sequence; ``frequencies`` is ``[r/2]``. The table is
    computed in float64, so that large positions are exact, and cast once for all layers to ``dtype``, which must be the
    dtype that ``ops.rope`` requires for the dtype of the activations.
    """
    # float32 has 24 bits: at position 100,000 the angle of the fastest pair would be wrong in the third digit.
    angles = position_ids.t().to(torch.float64)[:, :, None] * frequencies
    return (magnitude * angles.cos()).to(dtype), (magnitude * angles.sin()).to(dtype)


def plain_frequencies(channels: int, base: float, device: torch.device | None = None) -> Tensor:
    """Return base^(-2i/r) for r = ``channels``, ``[r/2]`` in float64."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float64, device=device)
    return base ** -(exponents / channels)


def rotary_frequencies(
    config: ModelConfig, channels: int, max_sequence_length: int, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Return the configured frequencies ``[channels/2]`` and the magnitude for ``rotary_table``.

    ``max_sequence_length``: positions in the longest text, to which a feature may scale the frequencies.
    """
    if config.rotary_scaling is None:
        return plain_frequencies(channels, config.rotary_base, device), 1.0
    return load_hook(config.rotary_scaling)(config, channels, max_sequence_length, device)
