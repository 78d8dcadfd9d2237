"""Model FLOPs against the formula of Narayanan et al. 2021 and against counted weights."""

from __future__ import annotations

import pytest

from megatron_core.config import ModelConfig
from megatron_core.config.flops import flops_per_token, forward_flops_per_token


def test_a_gpt_has_the_papers_number():
    # GPT-3: Narayanan et al. 2021, equation 3 with 72 (no recomputation) in place of 96
    layers, hidden, seq, vocab = 96, 12288, 2048, 51200
    paper = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    for positions in ("learned_absolute", "alibi"):  # channels for biases are not work of the model
        model = ModelConfig(
            num_layers=layers, hidden_size=hidden, num_attention_heads=96, position_embedding_type=positions
        )
        assert flops_per_token(model, seq, vocab) == pytest.approx(paper, rel=1e-12)


def test_matrices_count_six_for_each_weight():
    model = ModelConfig(
        num_layers=3,
        hidden_size=96,
        num_attention_heads=6,
        kv_channels=20,
        group_query_attention=True,
        num_query_groups=2,
        swiglu=True,
        ffn_hidden_size=160,
    )
    weights = 3 * (96 * (6 + 2 * 2) * 20 + 6 * 20 * 96 + 96 * 2 * 160 + 160 * 96) + 96 * 256
    assert flops_per_token(model, 0, 256) == 6 * weights


def test_attention_counts_all_keys_and_grows_with_the_sequence_alone():
    model = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    terms = forward_flops_per_token(model, 128, 256)
    assert terms["scores"] == terms["values"] == 2 * 128 * 64 * 2  # not halved for the causal mask
    assert flops_per_token(model, 256, 256) - flops_per_token(model, 128, 256) == 3 * 2 * terms["scores"]


def test_grouped_queries_save_only_keys_and_values():
    full = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    grouped = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4, group_query_attention=True)
    one, other = forward_flops_per_token(full, 8, 8), forward_flops_per_token(grouped, 8, 8)
    assert other["qkv"] == one["qkv"] // 2
    assert {k: v for k, v in one.items() if k != "qkv"} == {k: v for k, v in other.items() if k != "qkv"}


def test_latent_attention_counts_every_matrix_and_its_own_widths() -> None:
    shape = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 6, "ffn_hidden_size": 160, "swiglu": True}
    latent = {"kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
    keys_and_values = 96 * (24 + 8) + 24 * 6 * (16 + 12)
    others = 6 * 12 * 96 + 3 * 96 * 160
    for q_rank, queries in ((20, 96 * 20 + 20 * 6 * 24), (None, 96 * 6 * 24)):
        model = ModelConfig(**shape, **latent, multi_latent_attention=True, q_lora_rank=q_rank)
        assert flops_per_token(model, 0, 256) == 6 * (2 * (queries + keys_and_values + others) + 96 * 256)
        terms = forward_flops_per_token(model, 128, 256)
        assert (terms["scores"], terms["values"]) == (2 * 128 * 6 * 24 * 2, 2 * 128 * 6 * 12 * 2)


def test_prediction_of_later_tokens_after_a_dense_layer_has_no_experts() -> None:
    model = ModelConfig(num_layers=2, hidden_size=32, num_experts=4, moe_layer_freq=(1, 0), mtp_num_layers=1)
    dense = ModelConfig(num_layers=1, hidden_size=32)
    each = sum(forward_flops_per_token(dense, 8, 64).values())
    assert forward_flops_per_token(model, 8, 64)["mtp"] == each + 4 * 32 * 32
