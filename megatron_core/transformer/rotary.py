"""Rotary embedding: rotate channel pair i by position * base^(-2i/r) (Su et al. 2021, section 3.4.2)."""

import math

import torch
from torch import Tensor

from megatron_core.config import ModelConfig

LLAMA3_CONTEXT = 8192
LLAMA3_LOW = 1.0
LLAMA3_HIGH = 4.0
"""Context length of Llama 3, and the rotations over it below (above) which a channel is slow (fast) (Llama 3.1)."""


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


def scaled_frequencies(
    config: ModelConfig, channels: int, max_sequence_length: int, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Return the configured frequencies ``[channels/2]`` and the magnitude for ``rotary_table``.

    ``max_sequence_length``: positions in the longest text, for dynamic scaling and LongRoPE.
    """
    base = config.rotary_base
    factor = config.rope_scaling_factor
    scaling = config.rope_scaling_type if config.use_rope_scaling else None
    if scaling in ("ntk", "dynamic"):
        if scaling == "dynamic":
            original = config.original_max_position_embeddings or max_sequence_length
            factor = factor * max(max_sequence_length / original, 1.0) - (factor - 1.0)
        # Divides the lowest frequency by the factor and keeps the highest.
        base = base * factor ** (channels / (channels - 2))
    frequencies = plain_frequencies(channels, base, device) / (config.rotary_seq_len_interpolation_factor or 1.0)
    if scaling == "llama3":
        return llama3_frequencies(frequencies, factor, config.original_max_position_embeddings or LLAMA3_CONTEXT), 1.0
    if scaling == "yarn":
        return yarn_frequencies(frequencies, config), yarn_magnitude(config)
    if scaling == "longrope":
        return longrope_frequencies(frequencies, config, max_sequence_length)
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


def yarn_frequencies(frequencies: Tensor, config: ModelConfig) -> Tensor:
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


def yarn_magnitude(config: ModelConfig) -> float:
    """Return YaRN's factor on cosine and sine, which keeps attention sharp on longer sequences (equation 22)."""
    if config.yarn_attention_factor is not None:
        return config.yarn_attention_factor
    factor = config.rope_scaling_factor
    return yarn_mscale(factor, config.mscale) / yarn_mscale(factor, config.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return 1 + 0.1 mscale ln(factor), or 1 if factor <= 1."""
    return 1.0 if factor <= 1.0 else 1.0 + 0.1 * mscale * math.log(factor)


def longrope_frequencies(frequencies: Tensor, config: ModelConfig, max_sequence_length: int) -> tuple[Tensor, float]:
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


def query_temperature(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Factor on the queries of layers without rotary positions, ``[s, b]``, from positions ``[b, s]``; None: 1.

    1 + a ln(1 + floor((position + 1) / f)) with ``query_temperature_scale`` a and ``query_temperature_floor`` f; with
    ``query_temperature_of_rotary`` on the queries of the other layers, and position in place of position + 1.
    Source: Llama 4, Ministral 3; Nakanishi 2025, arXiv 2501.19399.
    """
    if not config.query_temperature_scale:
        return None
    first = 0 if config.query_temperature_of_rotary else 1
    steps = (position_ids.t() + first) // config.query_temperature_floor
    return 1.0 + config.query_temperature_scale * torch.log1p(steps.to(dtype))
