"""Attention with linear biases (ALiBi), as further channels of queries and keys.

Press et al. 2022, arXiv 2108.12409: the score of a query at position p and a key at position k has the bias
-m (p - k) with a slope m of the head. As a product of channels it works with every kernel of attention, cache and split
of the sequence, because a key only needs its own position.
"""

import math

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.features.positions.settings import BIAS_CHANNELS
from megatron_core.ops.rows import wide
from megatron_core.transformer.context import AttentionStep, LayerContext

STEP = 256
"""Positions are split into a STEP^2 + b STEP + c, whose parts 16-bit formats hold exactly below 2^24."""


def bias_slopes(heads: range, total: int, like: Tensor) -> Tensor:
    """The slopes of some of ``total`` heads, on the device of ``like``.

    They are 2^(-8 i / n) for i = 1 to n if n is a power of 2; for other numbers, those of the largest power n below,
    then every second one of 2 n (as BLOOM).
    """
    below = 2 ** int(math.log2(total))
    number = torch.arange(total, dtype=wide(like.dtype), device=like.device)
    exponents = -4.0 * (2.0 * (number - below) + 1.0) / below
    # Of all heads, so that bits do not depend on the number of heads of a rank.
    slopes = torch.exp2(torch.where(number < below, -8.0 * (number + 1.0) / below, exponents))
    return slopes[heads.start : heads.stop]


class LinearBias(AttentionStep):
    """Appends the bias channels of a rank's heads."""

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        self.total = context.config.num_attention_heads
        heads = self.total // context.tp_group.size()
        self.heads = range(context.tp_group.rank() * heads, (context.tp_group.rank() + 1) * heads)

    @staticmethod
    def of_positions(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias channels ``[s, b, BIAS_CHANNELS]`` of keys at positions ``[b, s]``.

        They are (a STEP, b, c) twice, and (STEP, STEP), for the position a STEP^2 + b STEP + c.
        """
        positions = position_ids.t()
        steps = positions // STEP
        channels = [steps - steps % STEP, steps % STEP, positions % STEP] * 2 + [torch.full_like(positions, STEP)] * 2
        assert len(channels) == BIAS_CHANNELS, "the planner counts this number"
        return torch.stack(channels, dim=-1).to(dtype)

    def __call__(self, query: Tensor, key: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
        """See ``with_bias_channels``."""
        return with_bias_channels(query, key, channels, bias_slopes(self.heads, self.total, query))


def with_bias_channels(query: Tensor, key: Tensor, channels: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Append the bias channels to ``query`` ``[s, b, heads, d]`` and ``key`` ``[s, b, groups, d]``.

    Kernels divide scores by the square root of all channels. Each of the ``slopes`` ``[heads]`` is the sum of two
    numbers of the query's precision, and so is the bias of the query's own position. That one is the same for all keys
    and only keeps scores small: large scores are rounded where they are stored in 16 bits.
    """
    dtype = query.dtype
    precise = wide(query.dtype)
    # Undoes the division of scores by the square root of all channels.
    scaled = slopes * math.sqrt(query.shape[-1] + BIAS_CHANNELS)
    channels = channels.to(precise)
    positions = STEP * (channels[..., 0] + channels[..., 1]) + channels[..., 2]
    bias = -scaled * positions[..., None] / STEP
    # A slope in bfloat16 has 8 bits, too few at long distances; two addends have 16.
    of_slopes = [factor * half.expand_as(bias) for half in _in_two(scaled, dtype) for factor in (STEP, STEP, 1)]
    of_query = torch.stack([*of_slopes, *_in_two(bias, dtype)], dim=-1).to(dtype)
    of_key = channels[..., None, :].to(dtype).expand(*key.shape[:-1], -1)
    return torch.cat([query, of_query.expand(*query.shape[:-1], -1)], dim=-1), torch.cat([key, of_key], dim=-1)


def _in_two(numbers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``numbers`` rounded to ``dtype``, and the rest, both with the precision of ``numbers``."""
    rounded = numbers.to(dtype).to(numbers.dtype)
    return rounded, numbers - rounded
