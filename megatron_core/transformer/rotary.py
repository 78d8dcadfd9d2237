"""Rotary positions: the channels of pair i turn by position * base^(-2i/r) (Su et al. 2021, section 3.4.2)."""

import math

import torch
from torch import Tensor

from megatron_core.config import ModelConfig

LLAMA3_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
"""Positions that Llama 3 was trained on, and in how many turns over them a channel is slow or fast (Llama 3.1)."""


def rotary_table(
    position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype = torch.float64, *, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``magnitude`` times cosine and sine ``[s, b, r/2]`` of the positions ``[b, s]`` times ``frequencies`` ``[r/2]``;
    b = 1 stands for every sequence.

    Computed in float64, so that long positions lose nothing, and cast to ``dtype`` here, once for all layers: it is the
    one that ``ops.rope`` wants for the activations'.
    """
    angles = position_ids.t().to(torch.float64)[:, :, None] * frequencies
    return (magnitude * angles.cos()).to(dtype), (magnitude * angles.sin()).to(dtype)


def plain_frequencies(channels: int, base: float, device: torch.device | None = None) -> Tensor:
    """base^(-2i/r) for r = ``channels``, ``[r/2]`` in float64."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float64, device=device)
    return base ** -(exponents / channels)


def scaled_frequencies(
    config: ModelConfig, channels: int, max_sequence_length: int, device: torch.device | None = None
) -> tuple[Tensor, float]:
    """Frequencies ``[channels/2]`` of a model for sequences of ``max_sequence_length`` positions, and the magnitude of
    its ``rotary_table``, as its settings of rotary positions say."""
    base, factor = config.rotary_base, config.rope_scaling_factor
    kind = config.rope_scaling_type if config.use_rope_scaling else None
    if kind in ("ntk", "dynamic"):
        if kind == "dynamic":
            original = config.original_max_position_embeddings or max_sequence_length
            factor = factor * max(max_sequence_length / original, 1.0) - (factor - 1.0)
        # The slowest channel turns factor times as slowly, the fastest one as before.
        base = base * factor ** (channels / (channels - 2))
    frequencies = plain_frequencies(channels, base, device) / (config.rotary_seq_len_interpolation_factor or 1.0)
    if kind == "llama3":
        return llama3_frequencies(frequencies, factor, config.original_max_position_embeddings or LLAMA3_CONTEXT), 1.0
    if kind == "yarn":
        return yarn_frequencies(frequencies, config), yarn_magnitude(config)
    return frequencies, 1.0


def llama3_frequencies(frequencies: Tensor, factor: float, context: int = LLAMA3_CONTEXT) -> Tensor:
    """f / factor for channels with less than one turn over ``context`` positions, f for those with more than 4, and
    between them s f + (1 - s) f / factor with s = (turns - 1) / 3 (Llama 3.1)."""
    turns = context * frequencies / (2 * math.pi)
    share = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0)
    return share * frequencies + (1 - share) * frequencies / factor


def yarn_frequencies(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """(1 - s_i) f_i + s_i f_i / factor, where s_i rises linearly in i from 0 at the pair of channels with
    ``yarn_beta_fast`` turns over the original positions to 1 at that with ``yarn_beta_slow`` (Peng et al. 2023)."""
    pairs, original = frequencies.shape[0], config.original_max_position_embeddings
    assert original is not None, "validated with rope_scaling_type=yarn"

    def pair_with(turns: float) -> float:
        """i at which base^(-i/pairs) * positions / 2 pi is ``turns``."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(config.rotary_base)

    first, last = pair_with(config.yarn_beta_fast), pair_with(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    index = torch.arange(pairs, dtype=torch.float64, device=frequencies.device)
    share = ((index - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return (1 - share) * frequencies + share * frequencies / config.rope_scaling_factor


def yarn_magnitude(config: ModelConfig) -> float:
    """What YaRN multiplies cosine and sine by, so that longer sequences do not flatten the attention (equation 22)."""
    if config.yarn_attention_factor is not None:
        return config.yarn_attention_factor
    factor = config.rope_scaling_factor
    return yarn_mscale(factor, config.mscale) / yarn_mscale(factor, config.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """1 + 0.1 mscale ln(factor), and 1 for factors up to 1."""
    return 1.0 if factor <= 1.0 else 1.0 + 0.1 * mscale * math.log(factor)
