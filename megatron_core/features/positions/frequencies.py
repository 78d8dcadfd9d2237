"""Scaled rotary frequencies."""

import math

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.features.positions.settings import PositionConfig
from megatron_core.transformer.rotary import plain_frequencies

LLAMA3_CONTEXT = 8192
LLAMA3_LOW = 1.0
LLAMA3_HIGH = 4.0
"""Context length of Llama 3, and the rotations over it below (above) which a channel is slow (fast) (Llama 3.1)."""


def scaled_frequencies(
    config: ModelConfig, channels: int, max_sequence_length: int, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Return the configured frequencies ``[channels/2]`` and the magnitude for ``rotary_table``.

    ``max_sequence_length``: positions in the longest text, for dynamic scaling and LongRoPE.
    """
    settings = config.section(PositionConfig)
    base = config.rotary_base
    factor = settings.rope_scaling_factor
    scaling = settings.rope_scaling_type if settings.use_rope_scaling else None
    if scaling in ("ntk", "dynamic"):
        if scaling == "dynamic":
            original = settings.original_max_position_embeddings or max_sequence_length
            factor = factor * max(max_sequence_length / original, 1.0) - (factor - 1.0)
        # Divides the lowest frequency by the factor and keeps the highest.
        base = base * factor ** (channels / (channels - 2))
    frequencies = plain_frequencies(channels, base, device) / (settings.rotary_seq_len_interpolation_factor or 1.0)
    if scaling == "llama3":
        return llama3_frequencies(frequencies, factor, settings.original_max_position_embeddings or LLAMA3_CONTEXT), 1.0
    if scaling == "yarn":
        return yarn_frequencies(frequencies, settings), settings.yarn_magnitude
    if scaling == "longrope":
        return longrope_frequencies(frequencies, settings, max_sequence_length)
    return frequencies, 1.0


def llama3_frequencies(frequencies: Tensor, factor: float, context: int = LLAMA3_CONTEXT) -> Tensor:
    """Scale frequencies f by the number of rotations (turns) over ``context`` positions (Llama 3.1).

    f / factor for turns < 1, f for turns > 4, else s f + (1 - s) f / factor with s = (turns - 1) / 3.
    """
    # Pairs that turn often within the old context know relative positions and are kept; pairs that do not complete a
    # turn would see new angles, and are interpolated.
    turns = context * frequencies / (2 * math.pi)
    share = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0)
    return share * frequencies + (1 - share) * frequencies / factor


def yarn_frequencies(frequencies: Tensor, config: PositionConfig) -> Tensor:
    """Return (1 - s_i) f_i + s_i f_i / factor (Peng et al. 2023).

    s_i increases linearly in i from 0 at the channel pair with ``yarn_beta_fast`` rotations over the original positions
    to 1 at the pair with ``yarn_beta_slow`` rotations.
    """
    pairs = frequencies.shape[0]
    original = config.original_max_position_embeddings
    assert original is not None, "validated with rope_scaling_type=yarn"

    def pair_with(turns: float) -> float:
        """Return the i for which base^(-i/pairs) * positions / (2 pi) = ``turns``."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(config.rotary_base)

    first = pair_with(config.yarn_beta_fast)
    end = pair_with(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first = math.floor(first)
        end = math.ceil(end)
    first = max(first, 0)
    end = min(end, 2 * pairs - 1)
    index = torch.arange(pairs, dtype=torch.float64, device=frequencies.device)
    # The bound keeps a range of one pair from dividing by 0.
    share = ((index - first) / max(end - first, 1e-3)).clamp(0.0, 1.0)
    return (1 - share) * frequencies + share * frequencies / config.rope_scaling_factor


def longrope_frequencies(frequencies: Tensor, config: PositionConfig, max_sequence_length: int) -> tuple[Tensor, float]:
    """Divide each frequency by its factor, short or long; also return the magnitude (Ding et al. 2024).

    The long ones are for a longest text of more than the original n positions. The magnitude is the configured one, or
    sqrt(1 + ln(factor) / ln(n)), or 1 if factor <= 1.
    """
    original = config.original_max_position_embeddings
    scale = config.rope_scaling_factor
    assert original is not None, "validated with rope_scaling_type=longrope"
    # A function of the run's longest text and not of a batch: the cache of generation holds rotated keys.
    if max_sequence_length > original:
        factors = config.longrope_long_factor
        magnitude = config.longrope_long_mscale
    else:
        factors = config.longrope_short_factor
        magnitude = config.longrope_short_mscale
    if magnitude is None:
        magnitude = 1.0 if scale <= 1.0 else math.sqrt(1.0 + math.log(scale) / math.log(original))
    return frequencies / frequencies.new_tensor(factors), magnitude
