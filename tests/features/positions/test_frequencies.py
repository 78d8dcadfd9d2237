"""Scaled rotary frequencies against transformers and the formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_core.features.positions.frequencies import llama3_frequencies, yarn_frequencies
from megatron_core.features.positions.settings import PositionConfig
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES
from megatron_core.training.step import train_step
from megatron_core.transformer.rotary import plain_frequencies, rotary_frequencies, rotary_table
from tests.runs import tiny_run

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "theirs",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0} | LLAMA3,
        {"rope_type": "llama3", "factor": 8.0} | LLAMA3 | {"original_max_position_embeddings": 512},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"mscale": 0.9, "mscale_all_dim": 0.4},
        YARN | {"mscale": 0.9},  # without the other one it is not read
        YARN | {"attention_factor": 0.75},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
    ids=lambda theirs: " ".join(map(str, theirs.values())),
)
def test_scaled_positions_are_those_of_transformers(theirs: dict) -> None:
    """From a config.json; "dynamic" for a model trained on 1024 positions and run on 3001."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    lengths = {"max_position_embeddings": 1024 if theirs["rope_type"] == "dynamic" else 4096}
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 2, "rope_theta": 500_000.0, **lengths}
    sizes |= {"intermediate_size": 512, "rms_norm_eps": 1e-6}
    config = LlamaConfig(**sizes, rope_scaling=dict(theirs))
    ours = PositionConfig(**ARCHITECTURES["llama"].settings(sizes | {"rope_scaling": theirs}))
    positions = torch.tensor([[0, 1, 50, 3000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), positions)
    frequencies, magnitude = rotary_frequencies(ours, 128, 3001)
    table = rotary_table(positions, frequencies, magnitude=magnitude)
    plain = rotary_table(positions, plain_frequencies(128, 500_000.0))
    for mine, reference, unscaled in zip(table, (cos, sin), plain, strict=True):
        torch.testing.assert_close(mine[:, 0], reference[0, :, :64].double(), rtol=0, atol=3e-4)  # theirs is float32
        assert (mine - unscaled).abs().max() > 0.1


def test_a_larger_base_slows_the_slowest_channel_by_the_factor() -> None:
    settings = {"use_rope_scaling": True, "rope_scaling_type": "ntk", "rope_scaling_factor": 4.0}
    found, magnitude = rotary_frequencies(PositionConfig(**settings), 16, 64)
    plain = plain_frequencies(16, 10_000.0)
    assert found[0] == plain[0] and magnitude == 1.0
    assert found[-1].item() == pytest.approx(plain[-1].item() / 4.0, rel=1e-12)


def test_yarn_scales_slow_channels_alone() -> None:
    """Fast channels keep their frequency, slow ones are divided by the factor, those in between by less."""
    settings = {"rope_scaling_factor": 4.0, "original_max_position_embeddings": 64, "yarn_beta_fast": 2.0}
    exact = PositionConfig(**settings, yarn_beta_slow=0.2, yarn_correction_range_round_to_int=False)
    plain = plain_frequencies(16, 100.0)
    turns = 64 * plain / (2 * math.pi)
    ratio = yarn_frequencies(plain, replace(exact, rotary_base=100.0)) / plain
    assert torch.equal(ratio[turns >= 2.0], torch.ones(int((turns >= 2.0).sum())))
    assert ((ratio[turns < 2.0] < 1.0) & (ratio[turns < 2.0] >= 0.25)).all()
    torch.testing.assert_close(ratio[turns <= 0.2], torch.full(((turns <= 0.2).sum(),), 0.25).double())


def test_llama3_leaves_fast_channels_and_slows_slow_ones_exactly() -> None:
    frequencies = torch.tensor([1.0, 2 * math.pi * 2.5 / 8192, 1e-6], dtype=torch.float64)
    expected = torch.tensor([1.0, frequencies[1] * (0.5 + 0.5 / 8), 1e-6 / 8], dtype=torch.float64)
    torch.testing.assert_close(llama3_frequencies(frequencies, 8.0), expected, rtol=1e-14, atol=0)


def test_the_model_uses_the_scaling() -> None:
    rope = {"position_embedding_type": "rope", "fp64": True, "init_method_std": 0.3}
    yarn = {"use_rope_scaling": True, "rope_scaling_type": "yarn", "original_max_position_embeddings": 8}
    losses = [
        train_step(tiny_run(**rope, **settings)).loss
        for settings in ({}, {"rotary_seq_len_interpolation_factor": 4.0}, {"use_rope_scaling": True}, yarn)
    ]
    assert len(set(losses)) == 4
