"""Parameters and state by formula equal those of the model on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_core.planner.footprint import Footprint
from megatron_core.planner.parameters import rank_units
from megatron_core.reports.dry_run import RankEstimate
from tests.parity.heterogeneous_rows import LAYERS, NEMOTRON
from tests.runs import tiny_config

PIPELINE = {"num_layers": 4, "pipeline_model_parallel_size": 2}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
GROUPS = {"group_query_attention": True, "num_query_groups": 2}
EXPERTS = {"disable_bias_linear": True, "num_experts": 8, "moe_ffn_hidden_size": 48, "moe_router_topk": 2}
LATENTS = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
INDEXER = {"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 3, "attention_dropout": 0.0}
DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": (2,),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
MAMBA = {
    "hybrid_layer_pattern": "ME*M",
    "mamba_state_dim": 6,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": 6,
}
CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp4, fewer groups": GROUPS | LLAMA | {"tensor_model_parallel_size": 4, "ffn_hidden_size": 96},
    "pp2, tied": PIPELINE,
    "pp2, untied": PIPELINE | {"untie_embeddings_and_output_weights": True},
    "zb_v, both ends on a rank": PIPELINE | {"pipeline_schedule": "zb_v"},
    "interleaved": PIPELINE | {"num_virtual_stages_per_pipeline_rank": 2},
    "sandwich, norms of heads": LLAMA | {"norm_placement": "sandwich", "qk_layernorm": True},
    "gated attention, tp2": LLAMA | GROUPS | {"attention_output_gate": True, "tensor_model_parallel_size": 2},
    "gated delta net, tp2": LLAMA | DELTA_NET | {"tensor_model_parallel_size": 2, "optimizer": "muon"},
    "gated delta net, experts, pp2, lora": LLAMA | DELTA_NET | EXPERTS | PIPELINE | {"lora_rank": 4},
    "kimi delta attention, latents, tp2": LLAMA
    | LATENTS
    | DELTA_NET
    | {"experimental_attention_variant": "kimi_delta_attention", "linear_num_key_heads": 4}
    | {"tensor_model_parallel_size": 2, "no_rope_freq": (1,), "qk_layernorm": True, "latent_norm_epsilon": 1e-6},
    "pattern of layers, experts, pp2, lora": MAMBA | EXPERTS | PIPELINE | {"lora_rank": 4},
    "pattern of layers, sandwich, tp2": MAMBA
    | {"hybrid_layer_pattern": "M-", "norm_placement": "sandwich", "tensor_model_parallel_size": 2},
    "short convolutions, muon, tp2": LLAMA
    | {"hybrid_layer_pattern": "C-", "optimizer": "muon", "tensor_model_parallel_size": 2},
    "short convolutions, pp2, lora": LLAMA | PIPELINE | {"hybrid_layer_pattern": "C-*C", "lora_rank": 4},
    "norms without weights, of embeddings, untied, pp2": LLAMA
    | PIPELINE
    | {"disable_weight_layernorm": True, "embedding_layernorm": True, "qk_layernorm": True},
    "norm of embeddings with biases, tp2": {"embedding_layernorm": True, "tensor_model_parallel_size": 2},
    "value head, pp2": PIPELINE | {"value_head": True},
    "value head, biases, untied, tp2": LLAMA
    | {"value_head": True, "add_output_layer_bias": True, "tensor_model_parallel_size": 2},
    "value head, pp2, lora": PIPELINE | {"value_head": True, "lora_rank": 4},
    "xielu": {name: value for name, value in LLAMA.items() if name != "swiglu"} | {"xielu": True},
    "norms over heads": LLAMA | {"qk_layernorm": True, "qk_layernorm_over_heads": True},
    "experts, ep2": EXPERTS | LLAMA | {"expert_model_parallel_size": 2, "moe_layer_freq": (0, 1)},
    "latent experts, tp2 ep2 etp1": LLAMA
    | EXPERTS
    | {"moe_latent_size": 12, "tensor_model_parallel_size": 2, "sequence_parallel": True, "optimizer": "muon"}
    | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "experts, tp2 etp1": EXPERTS
    | {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
    | {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True},
    "experts with biases, sinks, tp2 ep2": GROUPS
    | {"num_experts": 8, "moe_ffn_hidden_size": 48, "quick_geglu": True, "softmax_type": "learnable"}
    | {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "optimizer": "muon"},
    "one norm, norms without biases, weights of each head, tp2": LLAMA
    | GROUPS
    | {"normalization": "LayerNorm", "disable_bias_layernorm": True, "tensor_model_parallel_size": 2}
    | {"parallel_residual": True, "parallel_residual_shared_norm": True}
    | {"qk_layernorm": True, "qk_layernorm_weight_per_head": True},
    "norms with biases, weights of each head": {"qk_layernorm": True, "qk_layernorm_weight_per_head": True},
    "biases of attention and output layer, tp2 ep2": LLAMA
    | EXPERTS
    | {"add_qkv_bias": True, "add_attention_output_bias": True, "add_output_layer_bias": True}
    | {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "latents, tp2": LLAMA | LATENTS | {"tensor_model_parallel_size": 2, "q_lora_rank": 24, "qk_layernorm": True},
    "latents of keys alone": LLAMA | LATENTS,
    "sparse attention, pp2": LLAMA | LATENTS | INDEXER | PIPELINE | {"dsa_indexer_loss_coeff": 0.1},
    "sparse attention, indexers not trained, tp2": LLAMA | LATENTS | INDEXER | {"tensor_model_parallel_size": 2},
    "sparse attention, warm-up, zb_v": LLAMA
    | LATENTS
    | INDEXER
    | PIPELINE
    | {"dsa_indexer_loss_coeff": 0.1, "dsa_indexer_warmup": True, "pipeline_schedule": "zb_v"},
    "sparse attention and delta nets in a pattern, tp2": LLAMA
    | LATENTS
    | INDEXER
    | {"hybrid_layer_pattern": "G*-*", "num_layers": 4, "dsa_indexer_loss_coeff": 0.1, "tensor_model_parallel_size": 2},
    "sparse attention, lora": LLAMA | LATENTS | INDEXER | {"lora_rank": 4},
    "two tokens ahead by one layer, pp2": LLAMA | PIPELINE | {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "two tokens ahead, pp2": LLAMA | PIPELINE | {"mtp_num_layers": 2},
    "two tokens ahead, tied, pp2": PIPELINE | {"mtp_num_layers": 2, "position_embedding_type": "rope"},
    "pattern of layers, two tokens ahead, pp2": MAMBA
    | PIPELINE
    | {"mtp_num_layers": 2, "mtp_layer_pattern": "*-", "hybrid_layer_pattern": "MMMM", "optimizer": "muon"}
    | {"position_embedding_type": "none"},
    "pattern of layers, experts ahead": MAMBA
    | EXPERTS
    | {"mtp_num_layers": 1, "mtp_layer_pattern": "*E", "hybrid_layer_pattern": "MM"}
    | {"position_embedding_type": "none"},
    "two tokens ahead, zb_v": LLAMA | PIPELINE | {"pipeline_schedule": "zb_v", "mtp_num_layers": 1},
    "layers of different sizes, tp2": LAYERS | {"tensor_model_parallel_size": 2},
    "layers of different sizes, muon, pp2": NEMOTRON | PIPELINE | {"num_layers": 5, "optimizer": "muon"},
    "layers of different sizes, lora, tp2": NEMOTRON | {"lora_rank": 4, "tensor_model_parallel_size": 2},
    "zero1": {"zero_stage": 1, "bf16": True},
    "zero2, overlap": PIPELINE | {"zero_stage": 2, "bf16": True, "overlap_grad_reduce": True},
    "zero3, experts": EXPERTS | {"zero_stage": 3, "expert_model_parallel_size": 2},
    "lora, interleaved": PIPELINE | {"num_virtual_stages_per_pipeline_rank": 2, "lora_rank": 4},
    "dora, parts, fewer groups, tp4": LLAMA
    | GROUPS
    | {"tensor_model_parallel_size": 4, "ffn_hidden_size": 96, "lora_rank": 4, "use_dora": True}
    | {"lora_target_modules": ("q_proj", "v_proj", "up_proj", "down_proj")},
    "lora, experts, zb_v, zero3": EXPERTS
    | LLAMA
    | PIPELINE
    | {"zero_stage": 3, "expert_model_parallel_size": 2, "moe_layer_freq": (0, 1, 1, 0), "lora_rank": 4}
    | {"moe_shared_expert_intermediate_size": 64, "pipeline_schedule": "zb_v"},
    "lora of parts of delta nets, tp2": LLAMA
    | DELTA_NET
    | {"tensor_model_parallel_size": 2, "lora_rank": 4, "use_dora": True}
    | {"lora_target_modules": ("in_proj_qkv", "in_proj_b", "out_proj", "gate_proj")},
    "lora of a layer, latents, tp2": LLAMA
    | LATENTS
    | {"tensor_model_parallel_size": 2, "q_lora_rank": 24, "lora_rank": 4}
    | {"lora_target_modules": ("*.layers.1.*.linear_kv_up_proj", "q_a_proj", "linear_fc1")},
}

BIASED = "experts with biases, sinks, tp2 ep2"


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_every_pipeline_rank_has_the_parameters_of_the_model(settings: dict[str, Any]) -> None:
    config = tiny_config(**settings)
    for rank in (0, 3):
        found = RankEstimate.of(config, 4, rank)
        units = rank_units(found.config, found.layers, found.plan.stage_to_rank, found.vocab_size)
        own = found.groups.index("pp")
        held = sum(unit.total + unit.frozen + unit.frozen_experts for unit in units[own])
        assert held == found.parameters
        model = found.config.model
        frozen = found.config.value("lora_rank") is not None or model.dsa_indexer_warmup
        frozen = frozen or model.has_sparse_attention > model.trains_indexers
        assert any(unit.total for unit in units[own]) and any(unit.frozen for unit in units[own]) == frozen


@pytest.mark.parametrize(
    "name",
    [
        *("one rank", "tp2", "interleaved", "zero1", "zero2, overlap", "zero3, experts", "lora, interleaved", BIASED),
        "gated delta net, tp2",
    ],
)
def test_state_is_that_of_the_buffers_but_for_their_padding(name: str) -> None:
    config = tiny_config(**CASES[name], hidden_size=128, vocab_size=512)
    found = RankEstimate.of(config, 4)
    units = rank_units(found.config, found.layers, found.plan.stage_to_rank, found.vocab_size)
    formula = Footprint.of(found.config, 4, found.plan, found.layers, units, found.vocab_size).state(0)
    real = found.bytes_by_kind
    assert set(real) >= {kind for kind, size in formula.items() if size}
    for kind, size in formula.items():
        assert size <= real.get(kind, 0) <= 1.02 * size + 4096


def test_published_sizes() -> None:
    """Models with published sizes."""
    from megatron_core.config import RunConfig
    from megatron_core.config.partition import layers_by_stage
    from megatron_core.features.presets.published import preset

    sizes = {"llama3-8b": 8_030_261_248, "mixtral-8x7b": 46_702_792_704, "qwen3-0.6b": 596_049_920, "gpt2": 124_439_808}
    sizes["deepseek-v2-lite"] = 15_706_484_224
    for name, published in sizes.items():
        config = RunConfig.from_flat(preset(name) | {"make_vocab_size_divisible_by": 1})
        units = rank_units(config, layers_by_stage(config, 1, 1), (0,), config.data.vocab_size or 0)
        assert sum(unit.total for unit in units[0]) == published, name
