"""The table of rotary positions against the formula, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_core.ops import rope
from megatron_core.training.step import train_step
from megatron_core.transformer.rotary import llama3_frequencies, rotary_table
from tests.runs import tiny_run


@pytest.mark.parametrize("positions", [[[0, 1, 2, 3]], [[0, 1, 0, 1], [5, 1_000_003, 0, 2]]])
def test_each_pair_of_channels_turns_by_its_position(positions: list[list[int]]) -> None:
    channels, base = 6, 10_000.0
    x = torch.randn(4, len(positions), 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rope(x, *rotary_table(torch.tensor(positions), channels, base))
    for position in range(4):
        for row, own in enumerate(positions):
            for i in range(channels // 2):
                angle = own[position] * base ** (-2 * i / channels)
                a, b = x[position, row, :, i], x[position, row, :, i + channels // 2]
                expected = torch.stack([a * math.cos(angle) - b * math.sin(angle)])
                torch.testing.assert_close(turned[position, row, :, i], expected[0], rtol=0, atol=1e-9)
    assert torch.equal(turned[..., channels:], x[..., channels:]), "further channels pass"


def test_the_table_of_a_dtype_is_the_exact_one_rounded() -> None:
    positions = torch.tensor([[0, 7, 100_000]])
    exact = rotary_table(positions, 8, 10_000.0)
    narrow = rotary_table(positions, 8, 10_000.0, torch.float32)
    assert exact[0].dtype == torch.float64
    assert all(torch.equal(ours, table.float()) for ours, table in zip(narrow, exact, strict=True))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"interpolation": 4.0}),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            {"llama3_factor": 8.0},
        ),
    ],
)
def test_scaled_positions_are_those_of_transformers(theirs: dict, ours: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_theta=500_000.0, rope_scaling=theirs)
    positions = torch.tensor([[0, 1, 50, 3000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), positions)
    table = rotary_table(positions, 128, 500_000.0, **ours)
    plain = rotary_table(positions, 128, 500_000.0)
    for mine, reference, unscaled in zip(table, (cos, sin), plain, strict=True):
        torch.testing.assert_close(mine[:, 0], reference[0, :, :64].double(), rtol=0, atol=2e-4)  # theirs is float32
        assert (mine - unscaled).abs().max() > 0.1


def test_llama3_leaves_fast_channels_and_slows_slow_ones_exactly() -> None:
    frequencies = torch.tensor([1.0, 2 * math.pi * 2.5 / 8192, 1e-6], dtype=torch.float64)
    expected = torch.tensor([1.0, frequencies[1] * (0.5 + 0.5 / 8), 1e-6 / 8], dtype=torch.float64)
    torch.testing.assert_close(llama3_frequencies(frequencies, 8.0), expected, rtol=1e-14, atol=0)


def test_the_model_uses_the_scaling() -> None:
    rope = {"position_embedding_type": "rope", "fp64": True, "init_method_std": 0.3}
    losses = [
        train_step(tiny_run(**rope, **settings)).loss
        for settings in ({}, {"rotary_seq_len_interpolation_factor": 4.0}, {"use_rope_scaling": True})
    ]
    assert len(set(losses)) == 3
