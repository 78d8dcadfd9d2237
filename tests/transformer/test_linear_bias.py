"""Attention with linear biases equals its formula, in 16 bits, too, where positions and slopes are split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from megatron_core.config import ModelConfig
from megatron_core.transformer.linear_bias import bias_slopes, key_channels, with_bias_channels

ALIBI = ModelConfig(position_embedding_type="alibi")


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 71, 112])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    slopes = bias_slopes(range(heads), heads, torch.zeros(1))
    torch.testing.assert_close(slopes, _get_alibi_slopes(heads, torch.device("cpu")), rtol=1e-6, atol=0)
    parts = [bias_slopes(range(first, first + 1), heads, torch.zeros(1)) for first in range(heads)]
    assert torch.equal(torch.cat(parts), slopes)


def _biases(dtype: torch.dtype, positions: Tensor, heads: int) -> Tensor:
    """The scores ``[heads, queries, keys]`` of queries and keys with zeros in all other channels."""
    channels = key_channels(ALIBI, positions[None], dtype)
    assert channels is not None
    query, key = (torch.zeros(len(positions), 1, count, 8, dtype=dtype) for count in (heads, 1))
    query, key = with_bias_channels(query, key, channels, bias_slopes(range(heads), heads, query))
    return torch.einsum("sbhd,tbgd->hst", query.double(), key.double()) / math.sqrt(query.shape[-1])


def test_scores_have_the_bias_of_the_distance() -> None:
    positions = torch.tensor([0, 1, 255, 256, 257, 3000, 65_535])
    distances = positions[None] - positions[:, None]
    wanted = bias_slopes(range(6), 6, torch.zeros(1, dtype=torch.float64))[:, None, None] * distances
    torch.testing.assert_close(_biases(torch.float64, positions, 6), wanted, rtol=1e-12, atol=1e-9)


def test_in_16_bits_biases_differ_between_keys_as_in_float64() -> None:
    """To 2^-16 of the distance; that of the query's own position may be rounded, because all keys have it."""
    positions = torch.arange(4000, 4096)
    found, exact = (_biases(dtype, positions, 8) for dtype in (torch.bfloat16, torch.float64))
    between = (found - found[..., :1]) - (exact - exact[..., :1])
    assert between.abs().max() < 96 * 2**-16
    assert found.tril().abs().max() < 60, "scores stay small, although positions are large"


def test_other_positions_have_no_channels() -> None:
    assert key_channels(ModelConfig(), torch.arange(3)[None], torch.float32) is None
