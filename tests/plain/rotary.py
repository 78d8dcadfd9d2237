"""Positions: rotary embeddings with their scalings, linear biases, and the temperature of long texts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor


def unscaled(base: float, channels: int) -> Tensor:
    """theta_i = base^(-2i / channels) (Su et al. 2021, section 3.2.2)."""
    return torch.tensor([base ** (-2 * i / channels) for i in range(channels // 2)], dtype=torch.float64)


def frequencies(s: SimpleNamespace, channels: int, longest: int) -> tuple[Tensor, float]:
    """The rotary frequencies of channel pairs, scaled, and the factor on cosine and sine.

    ``longest``: positions of the longest text.
    """
    base, kind = s.rotary_base, s.rope_scaling_type if s.use_rope_scaling else None
    factor = s.rope_scaling_factor
    if kind == "dynamic":
        # emozilla 2023: the factor grows with the text; 1 up to the original length.
        original = s.original_max_position_embeddings or longest
        factor = factor * max(longest, original) / original - (factor - 1)
    if kind in ("ntk", "dynamic"):
        base = base * factor ** (channels / (channels - 2))  # bloc97 2023
    theta = unscaled(base, channels)
    if s.rotary_seq_len_interpolation_factor:
        theta = theta / s.rotary_seq_len_interpolation_factor  # Chen et al. 2023, equation 4
    if kind == "llama3":
        original = s.original_max_position_embeddings or 8192
        return torch.stack([llama3(float(f), factor, original) for f in theta]), 1.0
    if kind == "yarn":
        return yarn(s, theta, channels), yarn_attention(s)
    if kind == "longrope":
        return longrope(s, theta, longest)
    return theta, 1.0


def llama3(theta: float, factor: float, original: int) -> Tensor:
    """Llama 3.1's reference code: long wavelengths are scaled, short ones kept, and those between interpolated."""
    wavelength = 2 * math.pi / theta
    low, high = 1.0, 4.0
    if wavelength < original / high:
        return torch.tensor(theta, dtype=torch.float64)
    if wavelength > original / low:
        return torch.tensor(theta / factor, dtype=torch.float64)
    smooth = (original / wavelength - low) / (high - low)
    return torch.tensor((1 - smooth) * theta / factor + smooth * theta, dtype=torch.float64)


def yarn(s: SimpleNamespace, theta: Tensor, channels: int) -> Tensor:
    """Peng et al. 2023, section 3.2, in the form of DeepSeek's code: a linear ramp between two channel numbers."""

    def channel_of(turns: float) -> float:
        """The pair that makes ``turns`` turns over the original positions."""
        original = s.original_max_position_embeddings
        return channels * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(s.rotary_base))

    first, last = channel_of(s.yarn_beta_fast), channel_of(s.yarn_beta_slow)
    if s.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(channels // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return theta * (1 - ramp) + theta / s.rope_scaling_factor * ramp


def yarn_m(s: SimpleNamespace, x: float) -> float:
    """m(x) = 1 + 0.1 x ln(factor) (Peng et al. 2023, equation 22; DeepSeek-V2's code)."""
    return 1.0 if s.rope_scaling_factor <= 1 else 1.0 + 0.1 * x * math.log(s.rope_scaling_factor)


def yarn_attention(s: SimpleNamespace) -> float:
    """The factor on cosine and sine."""
    return s.yarn_attention_factor or yarn_m(s, s.mscale) / yarn_m(s, s.mscale_all_dim)


def longrope(s: SimpleNamespace, theta: Tensor, longest: int) -> tuple[Tensor, float]:
    """Ding et al. 2024, equation 3 and section 3.3."""
    original = s.original_max_position_embeddings
    is_long = longest > original
    divisors = s.longrope_long_factor if is_long else s.longrope_short_factor
    factor = s.longrope_long_mscale if is_long else s.longrope_short_mscale
    if factor is None:
        ratio = s.rope_scaling_factor
        factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return theta / torch.tensor(divisors, dtype=torch.float64), factor


def rotate(x: Tensor, positions: Tensor, theta: Tensor, factor: float, *, adjacent: bool) -> Tensor:
    """Rotate the first 2 len(theta) channels of ``x`` ``[b, t, heads, d]`` by position x frequency.

    A pair (a, b) becomes (a cos - b sin, a sin + b cos) (Su et al. 2021, equation 34). Pairs are channels 2i and 2i + 1
    if ``adjacent``, else i and i + half.
    """
    half = len(theta)
    angle = positions.double()[:, :, None, None] * theta  # [b, t, 1, half]
    cos, sin = factor * angle.cos(), factor * angle.sin()
    turned = x[..., : 2 * half]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if adjacent else (turned[..., :half], turned[..., half:])
    pair = first * cos - second * sin, first * sin + second * cos
    joined = torch.stack(pair, -1).flatten(-2) if adjacent else torch.cat(pair, -1)
    return torch.cat([joined, x[..., 2 * half :]], -1)


def slopes(heads: int) -> Tensor:
    """The slopes of linear biases (Press et al. 2022, section 3; their code for other numbers than powers of 2)."""

    def of_power(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 2 ** math.floor(math.log2(heads))
    values = of_power(power) + of_power(2 * power)[0::2][: heads - power]
    return torch.tensor(values, dtype=torch.float64)


def temperature(s: SimpleNamespace, positions: Tensor) -> Tensor:
    """1 + a ln(1 + floor((p + 1) / f)) of Llama 4's layers without rotary positions; Ministral 3 uses p."""
    shifted = positions + (0 if s.query_temperature_of_rotary else 1)
    steps = torch.div(shifted, s.query_temperature_floor, rounding_mode="floor").double()
    return 1 + s.query_temperature_scale * torch.log(1 + steps)
