"""Attention with linear biases equals its formula, in 16 bits, too, where positions and slopes are split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

from megatron_core.config import ModelConfig
from megatron_core.features.positions.linear_bias import LinearBias, bias_slopes, with_bias_channels
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SequenceContext
from megatron_core.transformer.attention import SelfAttention

ALIBI = ModelConfig(position_embedding_type="alibi")


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 71, 112])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    slopes = bias_slopes(range(heads), heads, torch.zeros(1))
    torch.testing.assert_close(slopes, _get_alibi_slopes(heads, torch.device("cpu")), rtol=1e-6, atol=0)
    parts = [bias_slopes(range(first, first + 1), heads, torch.zeros(1)) for first in range(heads)]
    assert torch.equal(torch.cat(parts), slopes)


def _biases(dtype: torch.dtype, positions: Tensor, heads: int) -> Tensor:
    """The scores ``[heads, queries, keys]`` of queries and keys with zeros in all other channels."""
    channels = LinearBias.of_positions(ALIBI, positions[None], dtype)
    query, key = (torch.zeros(len(positions), 1, count, 8, dtype=dtype) for count in (heads, 1))
    query, key = with_bias_channels(query, key, channels, bias_slopes(range(heads), heads, query))
    return torch.einsum("sbhd,tbgd->hst", query.double(), key.double()) / math.sqrt(query.shape[-1])


def test_scores_have_the_bias_of_the_distance() -> None:
    positions = torch.tensor([0, 1, 255, 256, 257, 3000, 65_535, 65_536, 1_000_001, 2**24 - 1])
    distances = positions[None] - positions[:, None]
    wanted = bias_slopes(range(6), 6, torch.zeros(1, dtype=torch.float64))[:, None, None] * distances
    torch.testing.assert_close(_biases(torch.float64, positions, 6), wanted, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [0, 4000, 65_500, 130_000, 1_000_000])
def test_in_16_bits_biases_differ_between_keys_as_in_float64(dtype: torch.dtype, first: int) -> None:
    """To 2^-16 of the distance; that of the query's own position may be rounded, because all keys have it."""
    positions = torch.arange(first, first + 96)
    found, exact = (_biases(each, positions, 8) for each in (dtype, torch.float64))
    between = (found - found[..., :1]) - (exact - exact[..., :1])
    assert between.abs().max() < 96 * 2**-16
    # Small scores keep their precision when they are stored in 16 bits.
    assert found.tril().abs().max() < 60 + first * 2**-15


def test_other_positions_have_no_channels() -> None:
    assert ModelConfig().attention_steps == () and ModelConfig().bias_channels == 0


@pytest.mark.parametrize("softmax_scale", [None, 0.3])
def test_attention_has_its_scale_and_keeps_no_projection(softmax_scale: float | None) -> None:
    """The values are a tensor of their own: a view would keep the queries and keys without biases until backward."""
    sizes = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 3, "kv_channels": 8, "attention_dropout": 0.0}
    config = ModelConfig(**sizes, position_embedding_type="alibi", softmax_scale=softmax_scale)
    parallel = ModelParallelConfig(params_dtype=torch.float64)
    attention = SelfAttention(LayerContext(config, parallel, LocalGroup(), 1), 0)
    given: list[Tensor] = []
    attention.core_attention.register_forward_pre_hook(lambda module, args: given.extend(args[:3]))
    x, positions = torch.randn(5, 1, 24, dtype=torch.float64), torch.arange(5)
    found = attention.attend(
        x, SequenceContext(for_steps=(LinearBias.of_positions(config, positions[None], torch.float64),))
    )
    assert given[2].untyped_storage().nbytes() == given[2].nbytes
    query, key, value = attention.linear_qkv(x)[0].view(5, 3, 3, 8).permute(2, 1, 0, 3)
    slopes = torch.tensor(_get_alibi_slopes(3, torch.device("cpu")).tolist(), dtype=torch.float64)
    scores = query @ key.transpose(1, 2) * (8**-0.5 if softmax_scale is None else softmax_scale)
    scores = scores + slopes[:, None, None] * (positions[None] - positions[:, None])
    weights = scores.masked_fill(positions[:, None] < positions, -torch.inf).softmax(-1)
    torch.testing.assert_close(found[:, 0], (weights @ value).transpose(0, 1).flatten(1), rtol=1e-7, atol=1e-9)
