"""Small random models of `transformers`, one of each supported architecture, as folders of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 61
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA = LLAMA | {
    "tie_word_embeddings": True,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
}
NEOX = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4, "initializer_range": 0.2}
MPT = {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 4, "n_heads": 4, "initializer_range": 0.2}
MPT |= {"max_seq_len": 64}
DEEPSEEK: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rms_norm_eps": 1e-6,
    "num_mtp_layers": 0,
    "num_key_value_heads": 4,
}
INDEXER = {"index_n_heads": 8, "index_head_dim": 6, "index_topk": 5}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "swiglu_limit": 0.5,  # small enough to bound some of the inner features
}
LATENTS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
YOUTU = LLAMA | {key: DEEPSEEK[key] for key in (*LATENTS, "num_key_value_heads")}
DEEPSEEK_V2 = {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "topk_group", "num_mtp_layers")}
GLM_MOE = {
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
}
LLAMA4 = {
    "head_dim": 16,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 5,
    "attn_scale": 0.3,
    "floor_scale": 3,
}
QWEN2_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
DELTA_NET = {
    "head_dim": 16,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
MAMBA2 = {key: LLAMA[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")}
MAMBA2 |= {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 8}
NEMOTRON_H = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
NEMOTRON_H |= {"mamba_num_heads": 6, "mamba_head_dim": 10, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 8}
NEMOTRON_H |= {"head_dim": 12, "conv_kernel": 3, "time_step_min": 0.5}
BAMBA = LLAMA | {"num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_conv": 3}
BAMBA |= {"mamba_chunk_size": 8}
FALCON_H1 = BAMBA | {
    **{"head_dim": 12, "mamba_d_ssm": 40, "mamba_n_heads": 4, "mamba_d_conv": 4, "embedding_multiplier": 1.5},
    **{"lm_head_multiplier": 0.7, "mlp_multipliers": [0.6, 1.7], "key_multiplier": 0.9, "attention_in_multiplier": 1.1},
    **{"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7},
    "ssm_multipliers": [0.875, 1.25, 0.8125, 1.375, 0.6875],  # transformers rounds them to float32 in a float64 model
}
GRANITE_HYBRID = BAMBA | GRANITE | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 40}
GRANITE_HYBRID |= {"num_local_experts": 0, "position_embedding_type": "nope", "rms_norm_eps": 1e-4}
LFM2 = LLAMA | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "norm_eps": 1e-4}
OPT = NEOX | {"ffn_dim": 48, "init_std": 0.2, "word_embed_proj_dim": 32, "tie_word_embeddings": True}
OPT = {key: value for key, value in OPT.items() if key not in ("intermediate_size", "initializer_range")}
TEMPERATURE = ("original_max_position_embeddings", "llama_4_scaling_beta")
MINISTRAL3_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 3,
    "llama_4_scaling_beta": 0.3,
}
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"type": "longrope", "short_factor": [1.1, 1.3], "long_factor": [1.5, 4.0]},
}
LONGROPE_OF_EXPERTS = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "short_mscale": 1.2,
    "long_mscale": 1.4,
    "original_max_position_embeddings": 32,
}
MELLUM = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 24}
AFMOE = MELLUM | {"num_shared_experts": 2, "sliding_window": 5, "global_attn_every_n_layers": 2}
MINICPM3 = YOUTU | {"q_lora_rank": 10, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "dim_model_base": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA | {"rms_norm_eps": 1e-5}),
    "llama, tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5e5}}),
    "llama, interpolated": ("Llama", LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama 3.1": ("Llama", LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA31}),
    "llama, biases of attention": ("Llama", LLAMA | {"attention_bias": True}),
    "llama, YaRN": (
        "Llama",
        LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "llama, dynamic": ("Llama", LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "mistral, window": ("Mistral", LLAMA | {"sliding_window": 5, "head_dim": 16}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2, window in some layers": (
        "Qwen2",
        LLAMA | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 6},
    ),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
    "phi3": ("Phi3", LLAMA),
    "phi3, longrope": ("Phi3", LLAMA | LONGROPE),
    "phi3, longrope with a given magnitude": (
        "Phi3",
        LLAMA | LONGROPE | {"rope_scaling": LONGROPE["rope_scaling"] | {"factor": 6.0, "attention_factor": 1.3}},
    ),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3Moe",
        LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 24},
    ),
    "qwen3_moe, dense layers alone": ("Qwen3Moe", LLAMA | {"head_dim": 16, "mlp_only_layers": [0, 1, 2, 3]}),
    "deepseek_v3, dense layers alone": (
        "DeepseekV3",
        LLAMA | DEEPSEEK | {"q_lora_rank": 10, "first_k_dense_replace": 4},
    ),
    "deepseek_v3": ("DeepseekV3", LLAMA | DEEPSEEK | {"q_lora_rank": 10}),
    "deepseek_v3, yarn": ("DeepseekV3", LLAMA | DEEPSEEK | {"q_lora_rank": 10, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3, another epsilon": ("DeepseekV3", LLAMA | DEEPSEEK | {"q_lora_rank": 10, "rms_norm_eps": 1e-3}),
    "deepseek_v3, queries without latent": ("DeepseekV3", LLAMA | DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v32": ("DeepseekV32", LLAMA | DEEPSEEK | INDEXER | {"q_lora_rank": 10}),
    "deepseek_v32, yarn": (
        "DeepseekV32",
        LLAMA | DEEPSEEK | INDEXER | {"q_lora_rank": 10, "rope_parameters": DEEPSEEK_YARN},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        LLAMA | DEEPSEEK | INDEXER | {"q_lora_rank": 10, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
    ),
    "olmo2": ("Olmo2", LLAMA),
    "olmoe": ("Olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmoe, normalized": ("Olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", LLAMA | QWEN2_MOE),
    "qwen2_moe, dense layers, windows": (
        "Qwen2Moe",
        LLAMA
        | QWEN2_MOE
        | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1], "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "deepseek_v2": ("DeepseekV2", LLAMA | DEEPSEEK_V2 | {"q_lora_rank": 10, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v2, groups": (
        "DeepseekV2",
        LLAMA
        | DEEPSEEK_V2
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
    ),
    "deepseek_v3, three experts": ("DeepseekV3", LLAMA | DEEPSEEK | {"q_lora_rank": 10, "num_experts_per_tok": 3}),
    "glm4_moe": ("Glm4Moe", LLAMA | GLM_MOE | {"use_qk_norm": True, "attention_bias": True}),
    "glm4_moe, groups": (
        "Glm4Moe",
        LLAMA | GLM_MOE | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_mtp_layers": 0},
    ),
    "dots1": (
        "Dots1",
        LLAMA | GLM_MOE | {"norm_topk_prob": True, "sliding_window": 5, "max_window_layers": 2, "head_dim": 16},
    ),
    "granite": ("Granite", LLAMA | GRANITE),
    "granite_swa": ("GraniteSWA", LLAMA | GRANITE | {"sliding_window": 5}),
    "granite_swa, bases of layers": (
        "GraniteSWA",
        LLAMA | GRANITE | {"sliding_window": 5, "layer_rope_theta": [0, 100.0, 100.0, 0]} | {"num_hidden_layers": 4},
    ),
    "granite_swa, bases of windows and others": (
        "GraniteSWA",
        LLAMA
        | GRANITE
        | {"sliding_window": 6, "layer_rope_theta": [1000.0, 100.0, 0, 1000.0], "tie_word_embeddings": True}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        LLAMA | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "granitemoe": ("GraniteMoe", LLAMA | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeShared",
        LLAMA | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "helium": ("Helium", LLAMA | {"head_dim": 8}),
    "arcee": ("Arcee", LLAMA),
    "nemotron": ("Nemotron", LLAMA | {"head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        LLAMA
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
        | {"moe_layer_interval": 2},
    ),
    "olmo3": ("Olmo3", LLAMA | {"sliding_window": 5}),
    "olmo3, YaRN": (
        "Olmo3",
        LLAMA
        | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"] * 2}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "llama4": ("Llama4Text", LLAMA | LLAMA4),
    "llama4, dense layers, plain attention": (
        "Llama4Text",
        LLAMA
        | LLAMA4
        | {"moe_layers": [1, 3], "no_rope_layers": [1, 0, 1, 0], "use_qk_norm": False}
        | {"attention_chunk_size": None, "attn_temperature_tuning": False},
    ),
    "exaone4": ("Exaone4", LLAMA | {"sliding_window": 5, "sliding_window_pattern": 2}),
    "stablelm, in parallel": ("StableLm", LLAMA | {"use_parallel_residual": True}),
    "stablelm, all channels rotated": (
        "StableLm",
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        LLAMA
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}},
    ),
    "cohere": ("Cohere", LLAMA | {"tie_word_embeddings": True, "logit_scale": 0.3}),
    "cohere, norms of queries and keys, biases": (
        "Cohere",
        LLAMA | {"use_qk_norm": True, "attention_bias": True, "layer_norm_eps": 1e-3},
    ),
    "cohere2": ("Cohere2", LLAMA | {"tie_word_embeddings": True, "sliding_window": 5, "sliding_window_pattern": 3}),
    "cohere2, biases, all layers with windows": (
        "Cohere2",
        LLAMA | {"attention_bias": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 4},
    ),
    "falcon": ("Falcon", NEOX | {"tie_word_embeddings": True}),
    "falcon, groups, two norms": (
        "Falcon",
        NEOX | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    ),
    "falcon, groups, one norm": (
        "Falcon",
        NEOX | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon, one after the other": ("Falcon", NEOX | {"parallel_attn": False, "multi_query": False, "bias": True}),
    "phi": ("Phi", LLAMA | {"num_key_value_heads": 4}),
    "phi, norms of queries and keys, exact GELU": (
        "Phi",
        LLAMA | {"qk_layernorm": True, "hidden_act": "gelu", "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    ),
    "phimoe": ("Phimoe", LLAMA | {"num_local_experts": 4} | dict.fromkeys(("attention_bias", "lm_head_bias"), True)),
    "phimoe, without biases, window, other threshold": (
        "Phimoe",
        LLAMA | {"num_local_experts": 8, "sliding_window": 5, "router_jitter_noise": 0.3, "rope_theta": 1e4},
    ),
    "phimoe, size of heads": ("Phimoe", LLAMA | {"num_local_experts": 4, "head_dim": 16}),
    "phimoe, longrope": ("Phimoe", LLAMA | {"num_local_experts": 4, "rope_scaling": LONGROPE_OF_EXPERTS}),
    "starcoder2": ("Starcoder2", LLAMA | {"tie_word_embeddings": True, "sliding_window": 5}),
    "gemma": ("Gemma", LLAMA | {"tie_word_embeddings": True, "head_dim": 16}),
    "glm": ("Glm", LLAMA | {"head_dim": 16}),
    "glm4": ("Glm4", LLAMA | {"head_dim": 16, "attention_bias": False}),
    "ernie4_5": ("Ernie4_5", LLAMA | {"tie_word_embeddings": True, "head_dim": 16}),
    "smollm3": ("SmolLM3", LLAMA | {"tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    "smollm3, windows": (
        "SmolLM3",
        LLAMA | {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 0, 1]},
    ),
    "seed_oss": ("SeedOss", LLAMA | {"head_dim": 16}),
    "stablelm": ("StableLm", LLAMA | {"use_qkv_bias": True}),
    "stablelm, norms of queries and keys": ("StableLm", LLAMA | {"qk_layernorm": True, "use_parallel_residual": True}),
    "gpt_oss": ("GptOss", LLAMA | GPT_OSS | {"rope_parameters": GPT_OSS_YARN}),
    "gpt_oss, plain positions": (
        "GptOss",
        LLAMA | GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gemma2": ("Gemma2", GEMMA | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "gemma3": (
        "Gemma3Text",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            },
        },
    ),
    "qwen3_next": ("Qwen3Next", LLAMA | QWEN2_MOE | DELTA_NET | {"mlp_only_layers": [1]}),
    "qwen3_next, every fourth layer": ("Qwen3Next", LLAMA | QWEN2_MOE | DELTA_NET | {"layer_types": None}),
    "qwen3_5": ("Qwen3_5Text", LLAMA | DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeText", LLAMA | QWEN2_MOE | DELTA_NET),
    "kimi_linear": (
        "KimiLinear",
        {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
        | {key: DEEPSEEK[key] for key in LATENTS}
        | {"num_key_value_heads": 4, "linear_num_heads": 3, "linear_head_dim": 6, "linear_conv_kernel_dim": 3}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
    ),
    "bamba": ("Bamba", BAMBA | {"attn_layer_indices": [1]}),
    "bamba, limited steps, tied": (
        "Bamba",
        BAMBA | {"attn_layer_indices": [0, 2], "time_step_limit": [0.5, 0.9], "tie_word_embeddings": True},
    ),
    "falcon_h1": ("FalconH1", FALCON_H1),
    "falcon_h1, norm of outputs": ("FalconH1", FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon_h1, norm before the gate, tied": (
        "FalconH1",
        FALCON_H1 | {"mamba_rms_norm": True, "tie_word_embeddings": True, "time_step_limit": [0.5, 0.9]},
    ),
    "granitemoehybrid, tied": ("GraniteMoeHybrid", GRANITE_HYBRID | {"tie_word_embeddings": True, "mamba_expand": 3}),
    "granitemoehybrid, experts": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID | {"num_local_experts": 4, "num_experts_per_tok": 2, "time_step_limit": [0.5, 0.9]},
    ),
    "granitemoehybrid, attention alone, rotary positions, biases": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID
        | {"layer_types": ["attention"] * 3, "position_embedding_type": "rope", "rope_theta": 1e3}
        | {"attention_bias": True, "head_dim": 12},
    ),
    "granitemoehybrid, attention and experts, without positions": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID | {"layer_types": ["attention"] * 3, "num_local_experts": 4, "position_embedding_type": None},
    ),
    "lfm2": ("Lfm2", LFM2 | {"block_auto_adjust_ff_dim": False}),
    "lfm2, tied, adjusted width, window of 4 tokens": (
        "Lfm2",
        LFM2
        | {"tie_word_embeddings": True, "block_ff_dim": 50, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8}
        | {"conv_L_cache": 4, "full_attn_idxs": [2], "layer_types": None, "head_dim": 12},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        LFM2
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 1}
        | {"routed_scaling_factor": 1.5},
    ),
    "lfm2_moe, dense layers alone": ("Lfm2Moe", LFM2 | {"num_dense_layers": 4}),
    "lfm2_moe, without biases, tied": (
        "Lfm2Moe",
        LFM2
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 0}
        | {"use_expert_bias": False, "tie_word_embeddings": True},
    ),
    "nanochat": ("NanoChat", LLAMA | {"final_logit_softcapping": 3.0, "head_dim": 12}),
    "nanochat, biases, tied, logits without a bound": (
        "NanoChat",
        LLAMA | {"final_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2, limited steps, tied": ("Mamba2", MAMBA2 | {"time_step_limit": [0.5, 0.9], "tie_word_embeddings": True}),
    "nemotron_h": (
        "NemotronH",
        NEMOTRON_H | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h, experts": (
        "NemotronH",
        NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
        | {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20}
        | {"routed_scaling_factor": 2.5, "n_group": 2, "time_step_min": 1e-20},  # steps without a lower bound
    ),
    "nemotron_h, latent experts": (
        "NemotronH",
        NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 12}
        | {"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20},
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2, exact GELU": ("GPT2", GPT2 | {"activation_function": "gelu"}),
    "gpt_bigcode": ("GPTBigCode", GPT2),
    "gpt_bigcode, a key for each query": ("GPTBigCode", GPT2 | {"multi_query": False, "n_inner": 48}),
    "glm4_moe_lite": ("Glm4MoeLite", LLAMA | DEEPSEEK | {"q_lora_rank": 10, "rms_norm_eps": 1e-3}),
    "glm4_moe_lite, kinds of layers, yarn": (
        "Glm4MoeLite",
        LLAMA
        | DEEPSEEK
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": DEEPSEEK_YARN}
        | {"num_hidden_layers": 8, "mlp_layer_types": ["dense", "sparse"] * 4},
    ),
    "solar_open": (
        "SolarOpen",
        {key: value for key, value in (LLAMA | GLM_MOE).items() if key != "first_k_dense_replace"}
        | {"n_shared_experts": 2, "routed_scaling_factor": 1.7, "head_dim": 16},
    ),
    "solar_open, groups, biases": (
        "SolarOpen",
        {key: value for key, value in (LLAMA | GLM_MOE).items() if key != "first_k_dense_replace"}
        | {"n_group": 4, "topk_group": 2, "attention_bias": True, "head_dim": 8},
    ),
    "ministral": (
        "Ministral",
        LLAMA
        | {"sliding_window": 5, "head_dim": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "ministral, no windows": (
        "Ministral",
        LLAMA | {"sliding_window": 5, "head_dim": 16, "layer_types": ["full_attention"] * 4},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        LLAMA
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 2}
        | {"sliding_window": 5, "sliding_window_pattern": 2, "head_dim": 16},
    ),
    "exaone_moe, groups, kinds of layers": (
        "ExaoneMoe",
        LLAMA
        | {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2}
        | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 4}
        | {"num_hidden_layers": 8, "mlp_layer_types": ["dense", "sparse"] * 4},
    ),
    "jais2": ("Jais2", LLAMA | {"layer_norm_eps": 1e-3}),
    "jais2, a key for each query, tied": (
        "Jais2",
        LLAMA | {"num_key_value_heads": None, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "youtu": ("Youtu", YOUTU | {"q_lora_rank": 10, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}),
    "youtu, yarn, queries without latent": (
        "Youtu",
        YOUTU | {"q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN},
    ),
    "hyperclovax": ("HyperCLOVAX", LLAMA | GRANITE | {"logits_scaling": 0.3}),
    "hyperclovax, norms before alone": (
        "HyperCLOVAX",
        LLAMA | {"use_post_norm": False, "head_dim": 16, "attention_bias": True},
    ),
    "opt": ("OPT", OPT),
    "opt, exact GELU, untied, without biases": (
        "OPT",
        OPT | {"activation_function": "gelu", "enable_bias": False, "tie_word_embeddings": False},
    ),
    "ministral3": (
        "Ministral3",
        LLAMA | {"head_dim": 16, "rope_parameters": MINISTRAL3_YARN},
    ),
    "ministral3, window, plain positions": (
        "Ministral3",
        LLAMA
        | {"sliding_window": 5, "head_dim": 8}
        | {"rope_parameters": {key: MINISTRAL3_YARN[key] for key in ("rope_theta", *TEMPERATURE)}},
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", LLAMA | {"head_dim": 16}),
    "hunyuan_v1_dense, another base, biases, tied": (
        "HunYuanDenseV1",
        LLAMA
        | {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        LLAMA | {"head_dim": 16, "num_experts": 4, "moe_topk": 2, "intermediate_size": 24},
    ),
    "hunyuan_v1_moe, a number for each layer, another base, tied": (
        "HunYuanMoEV1",
        LLAMA
        | {"head_dim": 12, "num_experts": 8, "moe_topk": [3] * 4, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "cwm": ("Cwm", LLAMA | {"sliding_window": 5, "head_dim": 16, "rope_parameters": LLAMA31 | {"rope_theta": 1e4}}),
    "cwm, no windows": ("Cwm", LLAMA | {"head_dim": 8, "layer_types": ["full_attention"] * 4}),
    "cwm, other layers": (
        "Cwm",
        LLAMA
        | {"sliding_window": 6, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "apertus": ("Apertus", LLAMA),
    "apertus, biases, tied": (
        "Apertus",
        LLAMA
        | {"attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "bloom": ("Bloom", BLOOM),
    "bloom, six heads, untied": (
        "Bloom",
        BLOOM | {"hidden_size": 36, "n_head": 6, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
    ),
    "mpt": ("Mpt", MPT),
    "mpt, another scale": ("Mpt", MPT | {"attn_config": {"softmax_scale": 0.3}, "tie_word_embeddings": False}),
    "internlm3": (
        "InternLM3",
        LLAMA | {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 1e4}},
    ),
    "iquestcoder": ("IQuestCoder", LLAMA | {"head_dim": 16}),
    "exaone": ("Exaone", LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA31}),
    "vaultgemma": ("VaultGemma", GEMMA | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "vaultgemma, no windows": ("VaultGemma", GEMMA | {"layer_types": ["full_attention"] * 4}),
    "flex_olmo": ("FlexOlmo", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "flex_olmo, normalized": ("FlexOlmo", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "sarvam_moe": ("SarvamMoE", LLAMA | GLM_MOE | {"n_shared_experts": 2, "head_dim": 16}),
    "sarvam_moe, groups, biases": (
        "SarvamMoE",
        LLAMA | GLM_MOE | {"n_group": 4, "topk_group": 2, "attention_bias": True, "use_qk_norm": False, "head_dim": 8},
    ),
    "sarvam_mla": ("SarvamMLA", LLAMA | DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "sarvam_mla, groups, yarn": ("SarvamMLA", LLAMA | DEEPSEEK | {"rope_parameters": DEEPSEEK_YARN, "q_lora_rank": 10}),
    "hy_v3": (
        "HYV3",
        LLAMA
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 2}
        | {"head_dim": 16},
    ),
    "hy_v3, kinds of layers": (
        "HYV3",
        LLAMA
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "router_scaling_factor": 1.0}
        | {"mlp_layer_types": ["sparse", "dense"] * 4, "num_hidden_layers": 8, "head_dim": 8},
    ),
    "mellum": ("Mellum", LLAMA | MELLUM),
    "mellum, windows, yarn, kinds of layers": (
        "Mellum",
        LLAMA
        | MELLUM
        | {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 5, "num_hidden_layers": 8}
        | {"mlp_layer_types": ["dense", "sparse"] * 4, "norm_topk_prob": False}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": GPT_OSS_YARN,
            },
        },
    ),
    "afmoe": ("Afmoe", LLAMA | AFMOE),
    "afmoe, scaled embeddings, kinds of layers": (
        "Afmoe",
        LLAMA
        | AFMOE
        | {"mup_enabled": True, "route_scale": 2.5, "num_dense_layers": 2, "num_shared_experts": 1}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_key_value_heads": 4},
    ),
    "minicpm3": ("MiniCPM3", MINICPM3),
    "minicpm3, longrope, untied": (
        "MiniCPM3",
        MINICPM3
        | {"tie_word_embeddings": False, "q_lora_rank": None, "scale_depth": 2.0}
        | {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.1, 1.3],
                "long_factor": [1.5, 4.0],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox, 20B's GELU": ("GPTNeoX", NEOX | {"hidden_act": "gelu_fast"}),
    "gpt_neox, interpolated": ("GPTNeoX", NEOX | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "gpt_neox, one after the other": ("GPTNeoX", NEOX | {"use_parallel_residual": False}),
}
RECURRENT = (
    *("qwen3_next", "qwen3_5", "kimi_linear", "mamba2", "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid"),
    "lfm2",
)
"""Beginnings of the names of models with a recurrence, which `transformers` computes in float32 throughout."""


def save_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Write one of ``MODELS`` with random weights, norms and biases included."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("_bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.5)
    for name, parameter in model.named_parameters():
        if name.endswith("decoder.embed_positions.weight"):  # of OPT: no token has the first two rows
            torch.nn.init.zeros_(parameter[:2])
    model.save_pretrained(folder, **options)
