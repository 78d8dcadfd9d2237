"""Settings of a model and a training from which ``drawn_rows`` draws; ``drawn_layouts`` has those of layouts."""

from __future__ import annotations

from typing import Any

from tests.parity.heterogeneous_rows import LAYERS, NEMOTRON
from tests.parity.latent_rows import DEEPSEEK_V3
from tests.parity.recurrent_rows import (
    BAMBA,
    DELTA,
    FALCON_H1,
    GRANITE_4,
    IN_FOUR,
    KIMI,
    LFM2,
    LFM2_MOE,
    MAMBA,
    NEMOTRON_H,
    PRODUCT,
    QWEN3_NEXT,
)
from tests.parity.sink_rows import FUSED, GPT_OSS
from tests.parity.sparse_rows import DEEPSEEK_V32, DSA, SPARSE, WARMUP

Settings = dict[str, Any]
Choices = list[Settings]
FILES = "{files}"
"""In a value: the folder of data files, which ``drawn_files`` writes."""
FOLDER = "{folder}"
"""In a value: a folder of the row."""


def either(name: str, *values: object) -> Choices:
    """One setting with several values."""
    return [{name: value} for value in values]


def on(name: str) -> Choices:
    """A switch."""
    return [{name: True}]


def crossed(first: Settings, **values: tuple[object, ...]) -> Choices:
    """``first`` alone, and with each value of each further setting."""
    return [first, *(first | {name: value} for name, options in values.items() for value in options)]


PACKED: Settings = {"reset_position_ids": True, "reset_attention_mask": True}
NTK: Settings = {"use_rope_scaling": True, "rope_scaling_type": "ntk", "rope_scaling_factor": 4.0}
EXPERTS: Settings = {"num_experts": 4, "moe_ffn_hidden_size": 24, "disable_bias_linear": True}
LATENT: Settings = {
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
}
MUP: Settings = {"use_mup": True, "mup_base_hidden_size": 8, "mup_base_head_dim": 4.0, "mup_embedding_mult": 3.0}
WSD: Settings = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2}
DECAY: Settings = {"start_weight_decay": 0.01, "end_weight_decay": 0.1}
SCALED: Settings = {"use_rope_scaling": True, "original_max_position_embeddings": 8}
YARN: Settings = SCALED | {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0}
LONG: Settings = SCALED | {"rope_scaling_type": "longrope"}
LONG |= {"longrope_short_factor": (1.0, 1.1, 1.2, 1.4), "longrope_long_factor": (1.5, 3.0, 3.5, 4.0)}
GROUPS: Settings = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
BIASED: Settings = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.05}
SPARSEMIXER: Settings = {"moe_router_score_function": "sparsemixer"}
FURTHER: Settings = {
    "moe_further_balancing_types": ("aux_loss", "global_aux_loss"),
    "moe_further_aux_loss_coeffs": (0.02, 0.03),
}
CAPACITY: Settings = {"moe_expert_capacity_factor": 0.75}
LINEAR_HEADS: Settings = {name: value for name, value in DELTA.items() if name.startswith("linear_")}
HYBRID: Settings = {"position_embedding_type": "rope", "hybrid_layer_pattern": "*-E*"} | EXPERTS
FP8: Settings = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
HISTORY: Settings = {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 2}
LORA: Settings = {"lora_rank": 3, "lora_alpha": 6.0}
MUON: Settings = {"optimizer": "muon"}
ADAMUON: Settings = {"optimizer": "adaptive_muon", "adaptive_muon_eps": 1e-3}
SOAP: Settings = {"optimizer": "soap"}
LAMB: Settings = {"optimizer": "lamb"}
CLIP: Settings = {"qk_clip": True, "qk_clip_threshold": 0.5}
TEXTS: Settings = {
    "mock_data": False,
    "split": "1,0,0",
    "tokenizer_type": "ByteLevelTokenizer",
    "vocab_size": None,
    "chat_template": f"{FILES}/chat.jinja",
    "seq_length": 48,
}
TOKENS: Settings = {"mock_data": False, "data_path": (f"{FILES}/tokens",), "split": "8,1,1"}
SFT: Settings = TEXTS | {"sft": True, "data_path": (f"{FILES}/talks.jsonl",)}
DPO: Settings = TEXTS | {"dpo": True, "data_path": (f"{FILES}/pairs.jsonl",), "micro_batch_size": 2, "lr": 1e-3}
TEACHER: Settings = {"kd_teacher": f"{FILES}/teacher", "kd_weight": 0.7}
SAMPLES: Settings = {"train_iters": None, "train_samples": 80}

# Settings of both sides. Each is drawn with its probability; earlier ones restrict later ones.
MODEL: list[tuple[float, Choices]] = [
    (
        0.4,
        [
            *(DELTA, IN_FOUR, QWEN3_NEXT, KIMI, MAMBA, BAMBA, FALCON_H1, NEMOTRON_H, GRANITE_4, LFM2, LFM2_MOE),
            *(MAMBA | LINEAR_HEADS | {"hybrid_layer_pattern": "MG*-", "linear_attention_freq": None},),
            *(DSA, SPARSE, SPARSE | WARMUP, DEEPSEEK_V32, DEEPSEEK_V3, LAYERS, NEMOTRON, GPT_OSS, FUSED, HYBRID),
            *(PRODUCT, {"position_embedding_type": "alibi"}, {"position_embedding_type": "alibi"}),
        ],
    ),
    (0.15, [TOKENS, TOKENS, SFT, SFT | {"sft_packing": "first_fit"}, SFT | {"sft_loss": "all"}]),
    # Sizes at which kernels and buckets have ends, single elements, or parts of different lengths.
    (0.1, either("vocab_size", 2, 7, 97, 127, 128, 131)),
    (0.1, either("seq_length", 1, 2, 13, 31, 64, 65)),
    (0.1, [{"hidden_size": 24, "num_attention_heads": 3}, {"hidden_size": 96, "num_attention_heads": 2}]),
    (0.04, [DPO | LORA, DPO | LORA | {"dpo_beta": 0.5, "dpo_label_smoothing": 0.1}]),
    (1.0, either("num_layers", 1, 2, 3, 4, 4, 5)),
    (0.6, either("position_embedding_type", "rope", "rope", "none")),
    (0.3, [EXPERTS]),
    (0.15, [LATENT, LATENT | {"q_lora_rank": 12}]),
    (0.3, [{"mtp_num_layers": 1}, {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5, "mtp_zero_last_input": True}]),
    (0.2, on("mtp_use_repeated_layer")),
    (0.2, on("mtp_hsm")),
    (0.2, either("mtp_layer_pattern", "*-", "*E", "*")),
    (0.4, on("untie_embeddings_and_output_weights")),
    (0.4, [{"group_query_attention": True, "num_query_groups": groups} for groups in (1, 2)]),
    (0.3, either("kv_channels", 6, 10, 16)),
    (0.5, either("ffn_hidden_size", 40, 48, 64)),
    (
        0.5,
        [
            *(*on("swiglu"), *on("geglu"), *on("squared_relu"), *on("relu"), *on("xielu"), *on("openai_gelu")),
            *on("quick_geglu"),
        ],
    ),
    (0.1, either("glu_linear_offset", 1.0)),
    (0.1, either("activation_func_clamp_value", 0.5)),
    (0.1, either("mlp_multipliers", (0.7, 1.6))),
    (0.5, on("disable_bias_linear")),
    (0.2, on("add_qkv_bias")),
    (0.2, on("add_attention_output_bias")),
    (0.2, on("add_output_layer_bias")),
    (0.4, either("normalization", "RMSNorm")),
    (0.2, on("apply_layernorm_1p")),
    (0.2, on("disable_bias_layernorm")),
    (0.1, on("disable_weight_layernorm")),
    (0.1, on("embedding_layernorm")),
    (0.1, either("norm_epsilon", 1e-3)),
    (0.1, either("latent_norm_epsilon", 1e-3)),
    (0.3, either("norm_placement", "sandwich", "post")),
    (
        0.4,
        crossed(
            {"qk_layernorm": True},
            qk_layernorm_over_heads=(True,),
            qk_layernorm_weight_per_head=(True,),
            qk_layernorm_after_rotary=(True,),
        ),
    ),
    (0.1, crossed({"qk_l2_norm": True}, qk_l2_norm_rotary_only=(True,))),
    (0.2, on("apply_wd_to_qk_layernorm")),
    (0.2, on("attention_output_gate")),
    (0.3, [{"parallel_residual": True}, {"parallel_residual": True, "parallel_residual_shared_norm": True}]),
    (0.2, on("scale_embeddings")),
    (0.1, either("embedding_multiplier", 3.0)),
    (0.1, either("residual_multiplier", 0.4)),
    (0.1, either("logit_multiplier", 0.5)),
    (0.2, either("softmax_scale", 0.3)),
    (0.15, either("softmax_type", "learnable", "off-by-one")),
    (0.2, either("attn_logit_softcapping", 2.0)),
    (0.2, either("final_logit_softcapping", 3.0)),
    (0.1, either("output_z_loss_coeff", 0.05)),
    (0.3, either("rotary_percent", 0.5)),
    (0.1, either("rotary_base", 50.0)),
    (0.2, on("rotary_interleaved")),
    (0.2, either("rotary_seq_len_interpolation_factor", 2.0)),
    (
        0.3,
        [
            *(NTK, *(SCALED | {"rope_scaling_type": kind} for kind in ("llama3", "dynamic")), LONG),
            *(LONG | {"longrope_long_mscale": 1.2}, LONG | {"longrope_short_mscale": 0.9}),
            *crossed(
                YARN,
                yarn_beta_fast=(4.0,),
                yarn_beta_slow=(0.5,),
                yarn_correction_range_round_to_int=(False,),
                mscale=(0.7,),
                mscale_all_dim=(0.3,),
                yarn_attention_factor=(1.3,),
            ),
        ],
    ),
    (0.1, either("no_rope_freq", (2,))),
    (0.1, either("attention_chunk_size", 5)),
    (
        0.1,
        crossed({"query_temperature_scale": 0.4, "query_temperature_floor": 3}, query_temperature_of_rotary=(True,)),
    ),
    (0.3, [{"window_size": (4, 0)}, {"window_size": (3, 0), "window_attn_skip_freq": (2,)}]),
    (0.1, either("rotary_base_of_windows", 100.0)),
    (0.1, either("max_position_embeddings", 64)),
    (0.1, [MUP, MUP | {"mup_attn_scale_power": 0.8}, MUP | {"mup_output_mult": 0.3}]),
    (0.1, either("embedding_init_method_std", 0.2)),
    (0.1, either("seed", 99)),
    (0.5, either("attention_dropout", 0.0)),
    (0.5, either("hidden_dropout", 0.0)),
    (0.3, [PACKED, {"reset_position_ids": True}, {"reset_attention_mask": True}]),
    (0.2, on("eod_mask_loss")),
    (0.3, either("moe_layer_freq", (2,))),
    (0.2, either("moe_latent_size", 16)),
    (0.3, either("moe_router_topk", 1, 3)),
    (
        0.3,
        [
            *either("moe_router_score_function", "sigmoid", "sqrtsoftplus", "sparsemixer"),
            *crossed(SPARSEMIXER, moe_sparsemixer_threshold=(0.2,), moe_sparsemixer_sampling=(True,)),
        ],
    ),
    (0.2, on("moe_router_pre_softmax")),
    (0.3, [GROUPS, GROUPS | {"moe_router_group_score_topk": 1}]),
    (0.2, on("moe_apply_probs_on_input")),
    (0.2, either("moe_router_sum_epsilon", 0.1)),
    (0.2, either("moe_router_topk_scaling_factor", 2.5)),
    (0.3, either("moe_router_load_balancing_type", "seq_sinkhorn", "none", "aux_loss", "global_aux_loss")),
    (0.6, either("moe_aux_loss_coeff", 0.1)),
    (0.2, [FURTHER]),
    (0.3, either("moe_z_loss_coeff", 0.01)),
    (0.05, on("moe_router_force_load_balancing")),
    (0.3, [BIASED]),
    (0.2, either("moe_input_jitter_eps", 0.1)),
    (0.3, [CAPACITY, CAPACITY | {"moe_token_drop_policy": "position"}]),
    (0.3, on("moe_pad_expert_input_to_capacity")),
    (0.05, either("moe_dispatch_fwd_dtype", "mxfp8")),
    (0.05, either("moe_combine_bwd_dtype", "mxfp8")),
    (0.4, either("moe_shared_expert_intermediate_size", 16)),
    (0.5, on("moe_shared_expert_gate")),
    (0.1, either("moe_router_dtype", "fp64")),
    (0.2, on("dsa_indexer_rope_interleaved")),
    (0.2, either("dsa_indexer_k_norm_epsilon", 1e-3)),
    (
        0.08,
        [
            *crossed(FP8, fp8_wgrad=(False,)),
            FP8 | {"fp8_format": "e4m3", "fp8_recipe": "rowwise"},
            *crossed(HISTORY, fp8_amax_compute_algo=("max",), fp8_margin=(1,)),
        ],
    ),
    (
        0.3,
        [
            {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0},
            {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0},
        ],
    ),
    (
        0.08,
        crossed(
            LORA,
            lora_dropout=(0.1,),
            use_dora=(True,),
            use_rslora=(True,),
            lora_target_modules=(("q_proj", "down_proj"), ("linear_qkv", "linear_fc2")),
        ),
    ),
    (0.05, [TEACHER, TEACHER | {"kd_temperature": 2.0}]),
    (0.06, [CLIP, CLIP | {"qk_clip_alpha": 0.3}]),
    (
        0.05,
        crossed(
            {"enable_mhc_connections": True},
            mhc_num_residual_streams=(2,),
            mhc_sinkhorn_iterations=(3,),
            mhc_init_gating_factor=(0.3,),
        ),
    ),
    (0.3, either("global_batch_size", 4, 12)),
    (0.2, [{"rampup_batch_size": (2, 2, 4)}, {"step_batch_size_schedule": ("0:2", "32:4")}]),
    (0.2, either("seq_length_warmup", (8, 4, 4), (12, 4, 2))),
    (0.3, either("seq_length", 12, 24, 32)),
    (0.1, either("eval_global_batch_size", 4)),
    (
        0.5,
        [
            *(*either("optimizer", "sgd", "lion", "lamb", "muon"), ADAMUON),
            *crossed(
                MUON,
                muon_momentum=(0.8,),
                muon_nesterov=(True,),
                muon_split_qkv=(False,),
                muon_split_heads=(True,),
                muon_split_gate_up=(True,),
                muon_scale_mode=("unit_rms_norm", "shape_scaling"),
                muon_extra_scale_factor=(0.2,),
                muon_num_ns_steps=(3,),
                muon_coefficient_type=("simple", "polar_express"),
                muon_scalar_optimizer=("lion",),
            ),
            *crossed(ADAMUON, adaptive_muon_moment2_method=("normuon",), adaptive_muon_beta2=(0.8,)),
            *crossed(
                SOAP,
                soap_shampoo_beta=(0.8,),
                soap_precondition_frequency=(2,),
                soap_max_precondition_dim=(40,),
                soap_split_qkv=(False,),
                soap_split_gate_up=(True,),
                soap_scalar_optimizer=("lion",),
            ),
            *crossed(LAMB, lamb_max_coeff=(0.6,), lamb_min_coeff=(0.5,), lamb_bias_correction=("rate", "none")),
            {"optimizer": "lion", "lion_beta1": 0.7, "lion_beta2": 0.9},
            {"optimizer": "sgd", "sgd_momentum": 0.7},
            {"optimizer": "sgd", "sgd_momentum": 0.0},
        ],
    ),
    (0.1, [{"adam_beta1": 0.8, "adam_beta2": 0.95}]),
    (0.1, either("adam_bias_correction", False)),
    (0.2, either("ema_decay", 0.9)),
    (0.2, either("weight_decay", 0.0, 0.3)),
    (0.2, [{"decoupled_lr": 2e-2}, {"decoupled_lr": 2e-2, "decoupled_min_lr": 5e-3}]),
    (0.2, either("clip_grad", 0.0, 100.0)),
    (0.2, either("clip_grad_value", 1e-2)),
    (0.05, [SAMPLES, SAMPLES | {"lr_decay_samples": 40}, SAMPLES | {"lr_warmup_samples": 12}]),
    (0.2, either("lr_warmup_iters", 1, 3)),
    (0.1, either("lr_warmup_fraction", 0.3)),
    (0.1, either("lr_warmup_init", 1e-3)),
    (0.1, either("lr_decay_iters", 6)),
    (0.1, either("min_lr", 2e-3)),
    (0.1, on("lr_one_step_later")),
    (
        0.4,
        [
            *(*either("lr_decay_style", "constant", "cosine", "inverse-square-root"), WSD),
            *(WSD | {"lr_wsd_decay_style": "linear"},),
            {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 16},
        ],
    ),
    (0.2, [DECAY | {"weight_decay_incr_style": kind} for kind in ("linear", "cosine")]),
]

BASE: Settings = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "init_method_std": 0.1,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 16,
    "vocab_size": 101,
    "tokenizer_type": "NullTokenizer",
    "mock_data": True,
    "global_batch_size": 8,
    "train_iters": 10,
    "lr": 1e-2,
    "adam_eps": 1e-3,  # a smaller one magnifies the rounding of gradients that are almost zero
    "clip_grad": 0.5,
    "fp64": True,
    "record_times": False,
}
