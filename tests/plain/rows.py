"""Configurations of the engine that the plain model computes, too: each setting that it knows at least once."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

ROPE = {"position_embedding_type": "rope"}
RMS = {"normalization": "RMSNorm"}
UNTIED = {"untie_embeddings_and_output_weights": True}
NO_BIAS = {"disable_bias_linear": True}
LLAMA = ROPE | RMS | UNTIED | NO_BIAS | {"swiglu": True}
GROUPS = {"group_query_attention": True, "num_query_groups": 2}
EXPERTS = ROPE | RMS | NO_BIAS | {"swiglu": True, "num_experts": 4, "moe_ffn_hidden_size": 8}
STREAMS = {"enable_mhc_connections": True, "mhc_num_residual_streams": 3, "mhc_sinkhorn_iterations": 4}
AUX = {"moe_aux_loss_coeff": 0.05}
SIGMOID = {"moe_router_score_function": "sigmoid"}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
LATENT = LLAMA | {
    "multi_latent_attention": True,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 5,
    "qk_layernorm": True,
}
MTP = LLAMA | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
SCALED = ROPE | {"use_rope_scaling": True, "original_max_position_embeddings": 8, "rotary_base": 100.0}
PACKED = {"tokenizer_type": "NullTokenizer", "reset_attention_mask": True}
FIXED = {"lr_decay_style": "constant"}
YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "original_max_position_embeddings": 64}
SAMPLES = {"train_iters": None, "train_samples": 40}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_decay_iters": 5}

MODELS: dict[str, Values] = {
    "gpt2": {"openai_gelu": True},
    "default width": {"ffn_hidden_size": None, "hidden_size": 24},
    "default width with gates": LLAMA | {"ffn_hidden_size": None, "hidden_size": 48},
    "more learned positions": {"max_position_embeddings": 20},
    "llama": LLAMA | {"norm_epsilon": 1e-2},
    "groups": LLAMA | GROUPS | {"kv_channels": 6, "rotary_base": 50.0},
    "one group": ROPE | GROUPS | {"num_query_groups": 1, "add_qkv_bias": True, "disable_bias_linear": True},
    "layer norms without biases": {"disable_bias_layernorm": True},
    "rms norms without weights": RMS | {"disable_weight_layernorm": True, "embedding_layernorm": True},
    "norms plus one": {"apply_layernorm_1p": True, "embedding_layernorm": True, "norm_epsilon": 1e-3},
    "rms norms plus one, embeddings scaled": LLAMA | {"apply_layernorm_1p": True, "scale_embeddings": True},
    "norms of outputs": LLAMA | {"norm_placement": "post"},
    "norms of both": {"norm_placement": "sandwich"},
    "norms of heads": ROPE | {"qk_layernorm": True, "apply_wd_to_qk_layernorm": True, "weight_decay": 0.3},
    "rms norms of heads": LLAMA | GROUPS | {"qk_layernorm": True},
    "norms over all heads": LLAMA | {"qk_layernorm": True, "qk_layernorm_over_heads": True},
    "norms with weights of each head": ROPE | GROUPS | {"qk_layernorm": True, "qk_layernorm_weight_per_head": True},
    "norms of heads after rotation": LLAMA | {"qk_layernorm": True, "qk_layernorm_after_rotary": True},
    "norms of heads without weights": LLAMA | {"qk_l2_norm": True, "norm_epsilon": 1e-2},
    "norms of rotated heads": LLAMA | {"qk_l2_norm": True, "qk_l2_norm_rotary_only": True, "no_rope_freq": (0, 1)},
    "half of the channels rotated": ROPE | {"rotary_percent": 0.5},
    "adjacent channels rotated": ROPE | {"rotary_interleaved": True},
    "positions interpolated": ROPE | {"rotary_seq_len_interpolation_factor": 3.0},
    "llama3 frequencies": SCALED | {"rope_scaling_factor": 4.0},
    "yarn": SCALED
    | YARN
    | {"kv_channels": 16, "yarn_beta_fast": 4.0, "yarn_beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn, not rounded": SCALED
    | YARN
    | {
        "kv_channels": 16,
        "yarn_correction_range_round_to_int": False,
        "yarn_beta_fast": 3.0,
        "yarn_beta_slow": 0.02,  # the ramp ends beyond the last pair
        "yarn_attention_factor": 1.3,
    },
    "longrope, long": SCALED
    | {
        "rope_scaling_type": "longrope",
        "longrope_short_factor": (1.0, 1.1),
        "longrope_long_factor": (1.5, 3.0),
        "longrope_long_mscale": 1.2,
    },
    "longrope, short": SCALED
    | {
        "rope_scaling_type": "longrope",
        "original_max_position_embeddings": 16,
        "longrope_short_factor": (1.0, 1.4),
        "longrope_long_factor": (1.5, 3.0),
        "longrope_short_mscale": 0.9,
    },
    "longrope, default magnitude": SCALED
    | {"rope_scaling_type": "longrope", "longrope_short_factor": (1.0, 1.1), "longrope_long_factor": (1.5, 3.0)},
    "larger base": ROPE | {"use_rope_scaling": True, "rope_scaling_type": "ntk", "rope_scaling_factor": 2.0},
    "dynamic base": SCALED | {"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0},
    "linear biases": {"position_embedding_type": "alibi"},
    "linear biases, 6 heads, groups": GROUPS
    | {"position_embedding_type": "alibi", "num_attention_heads": 6, "hidden_size": 24, "num_query_groups": 3},
    "no positions": {"position_embedding_type": "none"},
    "layers without rotation": LLAMA | {"num_layers": 4, "no_rope_freq": (2,)},
    "chunks and temperature": LLAMA
    | {
        "num_layers": 4,
        "no_rope_freq": (0, 1, 0, 1),
        "attention_chunk_size": 5,
        "query_temperature_scale": 0.4,
        "query_temperature_floor": 3,
    },
    "temperature of rotated layers": LLAMA
    | {"query_temperature_scale": 0.4, "query_temperature_floor": 4, "query_temperature_of_rotary": True},
    "chunks of four": LLAMA | {"attention_chunk_size": 5, "no_rope_freq": (0, 1), "seq_length": 16},
    "gpt2 of six layers": {"num_layers": 6},
    "windows": LLAMA | {"window_size": (3, 0)},
    "some windows, other base": LLAMA
    | {"num_layers": 3, "window_size": (2, 0), "window_attn_skip_freq": (1, 0, 1), "rotary_base_of_windows": 100.0},
    "every third layer without a window": {"num_layers": 3, "window_size": (2, 0), "window_attn_skip_freq": (3,)},
    "sinks": LLAMA | GROUPS | {"softmax_type": "learnable"},
    "off by one": {"softmax_type": "off-by-one"},
    "bounded scores and logits": LLAMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "scale of scores": ROPE | {"softmax_scale": 0.9},
    "gates": LLAMA | GROUPS | {"attention_output_gate": True},
    "biases of attention and output": LLAMA
    | {"add_qkv_bias": True, "add_attention_output_bias": True, "add_output_layer_bias": True, "logit_multiplier": 0.6},
    "parallel parts": {"parallel_residual": True},
    "parallel parts, one norm": ROPE | {"parallel_residual": True, "parallel_residual_shared_norm": True},
    "granite": LLAMA | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logit_multiplier": 0.5},
    "mup": ROPE
    | {
        "use_mup": True,
        "mup_base_hidden_size": 8,
        "mup_base_head_dim": 2.0,
        "mup_embedding_mult": 2.0,
        "mup_attn_scale_power": 0.8,
    },
    "mup, factor of logits": UNTIED
    | {"use_mup": True, "mup_base_hidden_size": 4, "mup_output_mult": 0.3, "optimizer": "sgd", "lr": 0.05},
    "streams": STREAMS | {"hidden_dropout": 0.2, "mhc_init_gating_factor": 0.5},
    "streams and experts": EXPERTS | AUX | STREAMS | {"num_layers": 4, "norm_placement": "sandwich"},
    "geglu": {"geglu": True},
    "geglu by tanh": {"geglu": True, "openai_gelu": True},
    "quick geglu": {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.7},
    "factors of the mlp": LLAMA | {"mlp_multipliers": (0.7, 1.6)},
    "squared relu": {"squared_relu": True},
    "relu": {"relu": True},
    "xielu": ROPE | {"xielu": True},
    "width of the mlp": {"ffn_hidden_size": 20},
    "z-loss": UNTIED | {"output_z_loss_coeff": 0.05},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.3, "seed": 99, "seq_length": 16},
    "dropout in documents": ROPE | PACKED | {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "latent attention": LATENT,
    "latent queries": LATENT | {"q_lora_rank": 7, "latent_norm_epsilon": 1e-2},
    "latent attention without norms, yarn": LATENT
    | SCALED
    | YARN
    | {"qk_layernorm": False, "mscale": 0.7, "mscale_all_dim": 0.9, "no_rope_freq": (0, 1)},
    "latent attention, scale": LATENT | {"softmax_scale": 0.7},
    "later tokens": MTP,
    "later tokens, learned positions": UNTIED | {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5},
    "later tokens, token 0 at the end": MTP | EXPERTS | AUX | {"mtp_zero_last_input": True},
    "later tokens, mixed": ROPE | PACKED | {"reset_position_ids": True, "mtp_num_layers": 3, "mtp_hsm": True},
    "later tokens, one layer": MTP
    | EXPERTS
    | AUX
    | {"mtp_use_repeated_layer": True, "scale_embeddings": True, "embedding_multiplier": 3.0},
    "later tokens, experts": MTP | EXPERTS | AUX | {"moe_router_enable_expert_bias": True, "moe_layer_freq": (0, 1)},
    "documents": ROPE | PACKED | {"reset_position_ids": True, "mtp_num_layers": 1},
    "documents, positions continue": PACKED | {"window_size": (4, 0)},
    "positions restart": ROPE | {"tokenizer_type": "NullTokenizer", "reset_position_ids": True},
    "layers of attention or mlp": LLAMA | {"num_layers": 4, "hybrid_layer_pattern": "*-*-"},
    "layers of one part, later tokens": MTP
    | {"num_layers": 4, "hybrid_layer_pattern": "*--*", "mtp_layer_pattern": "*-"},
    "layers of one part, later experts": EXPERTS
    | MTP
    | {"num_layers": 4, "hybrid_layer_pattern": "*E-*", "mtp_layer_pattern": "*E"},
    "layers of attention or experts": EXPERTS | AUX | {"num_layers": 4, "hybrid_layer_pattern": "*E-*"},
}

ROUTERS: dict[str, Values] = {
    "experts": EXPERTS,
    "experts with biases": {"num_experts": 4},
    "balance of sequences": EXPERTS | AUX,
    "balance of micro-batches": EXPERTS | AUX | {"moe_router_load_balancing_type": "aux_loss"},
    "balance of all tokens": EXPERTS | AUX | {"moe_router_load_balancing_type": "global_aux_loss"},
    "three balancing losses": EXPERTS
    | AUX
    | {
        "moe_further_balancing_types": ("aux_loss", "global_aux_loss"),
        "moe_further_aux_loss_coeffs": (0.02, 0.03),
        "moe_z_loss_coeff": 0.01,
    },
    "balance of all and of sequences": EXPERTS
    | AUX
    | {
        "moe_further_balancing_types": ("global_aux_loss",),
        "moe_further_aux_loss_coeffs": (0.03,),
    },
    "balance of micro-batches and of sequences": EXPERTS
    | AUX
    | {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_further_balancing_types": ("seq_aux_loss",),
        "moe_further_aux_loss_coeffs": (0.03,),
    },
    "no balance": EXPERTS | {"moe_router_load_balancing_type": "none"},
    "sinkhorn": EXPERTS | {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "sinkhorn of sequences": EXPERTS | {"moe_router_load_balancing_type": "seq_sinkhorn"},
    "quantiles of micro-batches": EXPERTS
    | {"moe_router_load_balancing_type": "quantile_balancing", "moe_router_quantile_balancing_ema": 0.3},
    "softmax before the choice": EXPERTS
    | AUX
    | {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.7},
    "sigmoid": EXPERTS | AUX | {"moe_router_score_function": "sigmoid", "moe_router_sum_epsilon": 0.1},
    "sigmoid, one expert": EXPERTS | {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "root of softplus": EXPERTS | AUX | {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk": 3},
    "sparsemixer": EXPERTS | {"moe_router_score_function": "sparsemixer", "moe_sparsemixer_threshold": 0.2},
    "sparsemixer, drawn": EXPERTS
    | {
        "moe_router_score_function": "sparsemixer",
        "moe_sparsemixer_threshold": 0.8,
        "moe_sparsemixer_sampling": True,
    },
    "groups of experts": EXPERTS
    | AUX
    | SIGMOID
    | {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 3},
    "groups by two scores, biases": EXPERTS
    | {
        "num_experts": 8,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_group_score_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.05,
    },
    "capacity": EXPERTS | AUX | {"moe_expert_capacity_factor": 0.6},
    "capacity of micro-batches": EXPERTS | {"moe_expert_capacity_factor": 0.6, "moe_capacity_per": "micro_batch"},
    "mean of means": {"calculate_per_token_loss": False},
    "mean of means, losses per token": EXPERTS
    | {
        "calculate_per_token_loss": False,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.1,
        "output_z_loss_coeff": 0.1,
    },
    "capacity by position": EXPERTS
    | {
        "moe_expert_capacity_factor": 0.5,
        "moe_token_drop_policy": "position",
        "moe_pad_expert_input_to_capacity": True,
    },
    "in turn": EXPERTS | {"moe_router_force_load_balancing": True},
    "jitter": EXPERTS | {"moe_input_jitter_eps": 0.2},
    "factors on inputs": EXPERTS
    | {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    "latent experts": EXPERTS | {"moe_latent_size": 10},
    "tokens in 8 bits": EXPERTS | {"moe_dispatch_fwd_dtype": "mxfp8", "hidden_size": 48},
    "tokens and gradients in 8 bits": EXPERTS
    | {"moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8", "moe_latent_size": 40},
    "shared experts": EXPERTS | {"moe_shared_expert_intermediate_size": 12},
    "shared experts with a gate": EXPERTS
    | {"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True, "moe_layer_freq": (2,)},
    "wide router": EXPERTS | {"moe_router_dtype": "fp64"},
}

OPTIMIZERS: dict[str, Values] = {
    "adam": {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-3, "weight_decay": 0.2},
    "adam without bias correction": {"adam_bias_correction": False, "clip_grad": 0.0},
    "clipped by value": {"optimizer": "sgd", "clip_grad_value": 0.01, "lr": 0.1},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.7, "weight_decay": 0.3, "lr": 0.1},
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1},
    "lion": LLAMA | {"optimizer": "lion", "lion_beta1": 0.7, "lion_beta2": 0.9, "weight_decay": 0.2},
    "lamb": {"optimizer": "lamb", "weight_decay": 0.2, "lamb_min_coeff": 0.5},
    "lamb, small limit": {"optimizer": "lamb", "lamb_max_coeff": 0.6},
    "lamb, rate": {"optimizer": "lamb", "lamb_bias_correction": "rate"},
    "lamb, none": {"optimizer": "lamb", "lamb_bias_correction": "none"},
    "muon": LLAMA | GROUPS | {"optimizer": "muon", "muon_momentum": 0.8, "weight_decay": 0.1},
    "muon, nesterov, heads, gates": LLAMA
    | {"optimizer": "muon", "muon_nesterov": True, "muon_split_heads": True, "muon_split_gate_up": True},
    "muon, whole matrices, rms": EXPERTS
    | {"optimizer": "muon", "muon_split_qkv": False, "muon_scale_mode": "unit_rms_norm", "muon_num_ns_steps": 3},
    "muon, simple, lion": LLAMA
    | {
        "optimizer": "muon",
        "muon_coefficient_type": "simple",
        "muon_scale_mode": "shape_scaling",
        "muon_extra_scale_factor": 0.2,
        "muon_scalar_optimizer": "lion",
    },
    "muon, polar express": LLAMA
    | {"optimizer": "muon", "muon_coefficient_type": "polar_express", "muon_num_ns_steps": 9},
    "adamuon": LLAMA | {"optimizer": "adaptive_muon", "adaptive_muon_beta2": 0.8, "adaptive_muon_eps": 1e-2},
    "normuon": EXPERTS | {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
    "soap": LLAMA | {"optimizer": "soap", "soap_shampoo_beta": 0.8, "adam_eps": 1e-4},
    "soap, seldom, small, lion": LLAMA
    | {
        "optimizer": "soap",
        "soap_precondition_frequency": 3,
        "soap_max_precondition_dim": 20,
        "soap_split_qkv": False,
        "soap_split_gate_up": True,
        "soap_scalar_optimizer": "lion",
        "adam_eps": 1e-4,
    },
    "linear decay": {"lr_warmup_iters": 2, "lr_warmup_init": 1e-3, "min_lr": 2e-3},
    "cosine decay": {"lr_decay_style": "cosine", "lr_decay_iters": 3, "lr_warmup_fraction": 0.4, "min_lr": 1e-3},
    "root decay": {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 2, "min_lr": 9e-3},
    "constant rate, one step later": FIXED | {"lr_one_step_later": True, "lr_warmup_iters": 1, "lr_warmup_init": 1e-3},
    "exponential end": WSD,
    "linear end": WSD | {"lr_wsd_decay_style": "linear"},
    "cosine end": WSD | {"lr_wsd_decay_style": "cosine", "min_lr": 1e-3},
    "root end": WSD | {"lr_wsd_decay_style": "minus_sqrt"},
    "weight decay grows": {"lr_decay_iters": 2, "min_lr": 0.03}
    | {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.9, "lr": 0.05},
    "weight decay grows along a cosine": FIXED
    | {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.9, "lr": 0.05},
    "rate of embeddings, not of positions": {"decoupled_lr": 3e-2, "positions_as_matrices": True},
    "rate of embeddings": UNTIED | {"decoupled_lr": 3e-2, "decoupled_min_lr": 2e-2, "min_lr": 1e-3},
    "rates by samples": SAMPLES | {"lr_warmup_samples": 6, "lr_decay_samples": 14, "min_lr": 1e-3},
    "rates by samples, WSD": SAMPLES | {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 8, "lr_decay_samples": 16},
    "weight decay by samples": SAMPLES
    | {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.9, "lr": 0.05},
    "growing batches": SAMPLES | {"global_batch_size": 8, "rampup_batch_size": (2, 2, 6), "lr_warmup_samples": 5},
    "batches in steps": {"step_batch_size_schedule": ("0:2", "24:4", "70:8"), "global_batch_size": 8},
    "growing sequences": LLAMA | {"seq_length_warmup": (4, 4, 8)},
    "average": {"ema_decay": 0.7},
}

ROWS = MODELS | ROUTERS | OPTIMIZERS

LAYOUTS: dict[str, tuple[str, int, Values]] = {
    "gpt2, tp2": ("gpt2", 2, TP2 | {"sequence_parallel": True}),
    "balance of all and of sequences, dp2": ("balance of all and of sequences", 2, {"micro_batch_size": 1}),
    "capacity, ep2": ("capacity", 2, {"expert_model_parallel_size": 2}),
    "groups, cp2": ("groups", 2, CP2),
    "later tokens, pp2": ("later tokens", 2, PP2),
    "latent queries, tp2 pp2": ("latent queries", 4, TP2 | PP2),
    "streams, tp2 sp": ("streams", 2, TP2 | {"sequence_parallel": True}),
    "streams and experts, pp2": ("streams and experts", 2, PP2),
}
"""Name of the row, number of ranks, and settings of the layout alone."""

FOUR = "layers without rotation"
"""A row with four layers, for stages."""
FULL = {"recompute_granularity": "full"}
EP2 = {"expert_model_parallel_size": 2}
FUSED = {"cross_entropy_loss_fusion": True}
FURTHER_LAYOUTS: dict[str, tuple[str, int, Values]] = {
    "unfused attention": ("groups", 1, {"attention_backend": "unfused", "apply_query_key_layer_scaling": True}),
    "reference kernels": ("rms norms plus one, embeddings scaled", 1, {"kernel_backend": "reference"}),
    "native kernels": ("rms norms plus one, embeddings scaled", 1, {"kernel_backend": "native"}),
    "equal bits in all layouts": (
        "llama",
        2,
        TP2 | {"layout_invariant": True, "layout_invariant_parts": 4, "layout_invariant_chunks": 2},
    ),
    "streams, cp2": ("streams", 2, CP2),
    "streams, tp2 pp2": ("streams", 4, TP2 | PP2),
    "streams and experts, ep2 zero3": ("streams and experts", 2, {"zero_stage": 3} | EP2),
    "streams and experts, recompute": ("streams and experts", 1, FULL | {"recompute_method": "uniform"}),
    "streams, selective recompute": (
        "streams",
        1,
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
    ),
    "no shards": ("gpt2", 2, {"zero_stage": 0}),
    "strategy no_shard": ("gpt2", 2, {"data_parallel_sharding_strategy": "no_shard"}),
    "native loss": ("gpt2", 1, FUSED),
    "loss with the output layer": ("llama", 1, FUSED | {"cross_entropy_fusion_impl": "linear"}),
    "padding of the vocabulary": ("gpt2", 1, {"make_vocab_size_divisible_by": 64}),
    "larger micro-batch": ("llama", 1, {"micro_batch_size": 4}),
    "compiled layers": ("llama", 1, {"compile": True, "compile_backend": "eager"}),
    "compiled layers, aot": ("llama", 1, {"compile": True, "compile_backend": "aot_eager"}),
    "compiled layers, tp2": ("llama", 2, TP2 | {"compile": True, "compile_backend": "aot_eager"}),
    "full recompute": (FOUR, 1, FULL | {"recompute_method": "uniform", "recompute_num_layers": 2}),
    "recompute of a block": (FOUR, 1, FULL | {"recompute_method": "block", "recompute_num_layers": 1}),
    "selective recompute": (
        "shared experts",
        1,
        {
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "layernorm", "moe_act", "shared_experts"),
        },
    ),
    "selective recompute of mlp": (
        "latent queries",
        1,
        {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj", "mlp")},
    ),
    "selective recompute of experts": (
        "experts",
        1,
        {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    ),
    "shards of the optimizer": ("gpt2", 2, {"use_distributed_optimizer": True}),
    "zero1": ("gpt2", 2, {"zero_stage": 1, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "zero2": ("gpt2", 2, {"zero_stage": 2, "ddp_bucket_size": 1000}),
    "zero3": ("gpt2", 2, {"zero_stage": 3, "zero3_keep_after_forward": True}),
    "zero3 with whole vectors": ("gpt2", 2, {"zero_stage": 3, "zero3_param_persistence_threshold": 64}),
    "weights on the host": ("gpt2", 2, {"zero_stage": 3, "zero3_param_cpu_offload": True}),
    "overlapped experts": (
        "experts",
        2,
        EP2 | {"micro_batch_size": 1, "overlap_moe_expert_parallel_comm": True},
    ),
    "strategy optim": ("gpt2", 2, {"data_parallel_sharding_strategy": "optim"}),
    "strategy optim_grads": ("gpt2", 2, {"data_parallel_sharding_strategy": "optim_grads"}),
    "strategy optim_grads_params": ("gpt2", 2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "instances": (
        "gpt2",
        4,
        {"micro_batch_size": 1, "num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True},
    ),
    "muon, cut matrices": ("muon", 2, {"zero_stage": 1, "use_layer_wise_param_layout": False}),
    "soap, dp2": ("soap", 2, {"zero_stage": 1}),
    "adamuon, tp2": ("adamuon", 2, TP2),
    "lamb, tp2": ("lamb", 2, TP2),
    "tp2 without overlap": ("llama", 2, TP2 | {"sequence_parallel": True, "tp_comm_overlap": False}),
    "tp2 in chunks": ("llama", 2, TP2 | {"sequence_parallel": True, "tp_comm_overlap_chunks": 2}),
    "over gloo": ("llama", 2, TP2 | {"distributed_backend": "gloo"}),
    "over shared memory": ("llama", 2, TP2 | {"distributed_backend": "shm"}),
    "order of ranks": ("llama", 4, TP2 | PP2 | {"rank_order": "pp-tp-cp-ep-dp"}),
    "cp2 all_gather": ("groups", 2, CP2 | {"cp_comm_type": ("all_gather",)}),
    "cp2 a2a": ("groups", 2, CP2 | {"cp_comm_type": ("a2a",)}),
    "cp4 a2a+p2p": (
        "chunks of four",
        4,
        {"context_parallel_size": 4, "cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)},
    ),
    "dropout, cp4 a2a+p2p": (
        "dropout",
        4,
        {"context_parallel_size": 4, "cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)},
    ),
    "documents, cp2": ("documents", 2, CP2),
    "documents over dp2": (
        "documents, positions continue",
        2,
        {
            "dynamic_context_parallel": True,
            "max_seqlen_per_dp_cp_rank": 16,
            "min_dynamic_context_parallel_size": 2,
            "micro_batch_size": 1,
        },
    ),
    "gpipe": (FOUR, 2, PP2 | {"pipeline_schedule": "gpipe"}),
    "1f1b": (FOUR, 2, PP2 | {"pipeline_schedule": "1f1b", "overlap_p2p_communication": False}),
    "interleaved": (FOUR, 2, PP2 | {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}),
    "interleaved by layers": (FOUR, 2, PP2 | {"num_layers_per_virtual_pipeline_stage": 1}),
    "zb_h1": (FOUR, 2, PP2 | {"pipeline_schedule": "zb_h1"}),
    "zb_h2": (FOUR, 2, PP2 | {"pipeline_schedule": "zb_h2"}),
    "zb_v": (FOUR, 2, PP2 | {"pipeline_schedule": "zb_v"}),
    "dualpipe_v": (FOUR, 2, PP2 | {"pipeline_schedule": "dualpipe_v", "micro_batch_size": 1}),
    "layout of stages": (FOUR, 2, PP2 | {"pipeline_model_parallel_layout": "Et|tttL"}),
    "first stage": (FOUR, 2, PP2 | {"decoder_first_pipeline_num_layers": 1}),
    "last stage": (FOUR, 2, PP2 | {"decoder_last_pipeline_num_layers": 1}),
    "one group, tp2": ("one group", 2, TP2),
    "sums of three stages of a rank": (
        "gpt2 of six layers",
        4,
        PP2 | {"num_virtual_stages_per_pipeline_rank": 3, "overlap_grad_reduce": True, "micro_batch_size": 1},
    ),
    "embedding and loss count as layers": (
        "gpt2 of six layers",
        2,
        PP2 | {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    ),
    "all gather of experts": ("experts", 2, EP2 | {"moe_token_dispatcher_type": "allgather"}),
    "overlapped shared experts": ("shared experts", 2, EP2 | {"moe_shared_expert_overlap": True}),
    "experts over tensor ranks": ("experts", 2, TP2 | {"expert_tensor_parallel_size": 1, **EP2}),
    "later tokens, tp2": ("later tokens, experts", 2, TP2 | {"sequence_parallel": True}),
    "three balancing losses, pp2": ("three balancing losses", 2, PP2),
}
"""Further layouts and ways of computing, which only ``make verify-all`` runs: each setting of them at least once."""

SCALED_LOSS = ("three balancing losses", "later tokens, experts", "z-loss", "clipped by value")
"""Rows with losses of layers, and with a limit of gradients, which also run with a loss scale."""
