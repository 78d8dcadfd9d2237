"""Rows of the parity matrix with gated delta nets, in the form of ``rows.ROWS``."""

from __future__ import annotations

from megatron_core.features.recurrent.settings import read_pattern
from tests.parity.moe_rows import CP2, EP2, ETP1, OVERLAP, PP2, RECOMPUTE, SMALL, SP, TP2, ZB_H1, ZB_V

NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DELTA = {
    "num_layers": 2,
    "global_batch_size": 4,
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": True,
    "swiglu": True,
    "ffn_hidden_size": 48,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": (2,),
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **NO_DROPOUT,
}
QWEN3_NEXT = DELTA | {
    **{name: value for name, value in SMALL.items() if "expert" in name or name == "moe_ffn_hidden_size"},
    "num_layers": 2,
    "moe_aux_loss_coeff": 0.1,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
}
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}
ZERO3 = {"zero_stage": 3}
IN_FOUR = DELTA | {"num_layers": 4, "linear_attention_freq": (1, 1, 0, 1)}

KIMI = DELTA | {
    **{name: value for name, value in SMALL.items() if "expert" in name or name == "moe_ffn_hidden_size"},
    "experimental_attention_variant": "kimi_delta_attention",
    "linear_num_key_heads": 4,
    "num_layers": 2,
    "apply_layernorm_1p": False,
    "attention_output_gate": False,
    "rotary_percent": 1.0,
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "latent_norm_epsilon": 1e-3,
    "no_rope_freq": (1,),
    "moe_router_score_function": "sigmoid",
}
MAMBA = {
    **{name: DELTA[name] for name in ("global_batch_size", "normalization", "ffn_hidden_size", "disable_bias_linear")},
    "num_layers": 4,
    "hybrid_layer_pattern": "M-*M",
    "position_embedding_type": "none",
    "squared_relu": True,
    "mamba_state_dim": 6,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": 8,
    "mamba_dt_min": 0.02,
    "mamba_dt_max": 0.1,
    **NO_DROPOUT,
}
PRODUCT = {name: value for name, value in MAMBA.items() if not name.startswith("mamba_dt")}
PRODUCT |= {"mamba_mixer": "gated_delta_product", "gdp_num_householder": 2}
BAMBA = {
    **{name: value for name, value in MAMBA.items() if name != "squared_relu"},
    "hybrid_layer_pattern": "M-*-",
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
FALCON_H1 = BAMBA | {
    "hybrid_layer_pattern": "H-H-",
    "mamba_output_norm": "none",
    "softmax_scale": 0.4,
    "mamba_multipliers": (1.3, 0.8, 1.2, 0.9, 0.7),
    "parallel_mixer_multipliers": (0.8, 1.7),
    "mlp_multipliers": (0.6, 1.7),
    "embedding_multiplier": 1.5,
    "logit_multiplier": 0.7,
}
NEMOTRON_H = MAMBA | {
    **{name: value for name, value in SMALL.items() if "expert" in name or name == "moe_ffn_hidden_size"},
    "num_layers": 4,
    "hybrid_layer_pattern": "ME*E",
    "moe_aux_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 16,
}
GRANITE_4 = {name: value for name, value in NEMOTRON_H.items() if name not in ("squared_relu", "mamba_dt_max")} | {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "softmax_scale": 0.2,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "logit_multiplier": 0.25,
}
LFM2 = {
    **{name: value for name, value in BAMBA.items() if not name.startswith("mamba")},
    "hybrid_layer_pattern": "C-*C",
    "linear_conv_kernel_dim": 3,
    "rotary_percent": 1.0,
    "qk_layernorm": True,
}
LFM2_MOE = LFM2 | {
    **{name: value for name, value in SMALL.items() if "expert" in name or name == "moe_ffn_hidden_size"},
    "hybrid_layer_pattern": "C-*E",
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_sum_epsilon": 0.1,
    "moe_router_topk_scaling_factor": 1.5,
}
LATENT = {
    **{name: KIMI[name] for name in ("multi_latent_attention", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim")},
    **{"v_head_dim": 10, "position_embedding_type": "rope"},
}
RECURRENT_ROWS: dict[str, tuple[int, dict, dict]] = {
    "delta net, tp2": (2, DELTA, TP2),
    "delta net, tp2 sp": (2, DELTA, TP2 | SP),
    "delta net and layer norms, cp2 tp2 sp": (4, DELTA | {"normalization": "LayerNorm"}, CP2 | TP2 | SP),
    "delta net, pp2": (2, DELTA, PP2),
    "delta net, cp2": (2, DELTA, CP2),
    "delta net, cp4, parts of 4 tokens": (4, DELTA | {"seq_length": 32}, {"context_parallel_size": 4}),
    "delta net, packed, cp2": (2, DELTA | PACKED, CP2),
    "delta net, packed, tp2 sp": (2, DELTA | PACKED, TP2 | SP),
    "delta net, micro-batches of 2": (1, DELTA | PACKED, {"micro_batch_size": 2}),
    "delta net, cp2, micro-batches of 2": (2, DELTA | PACKED, CP2 | {"micro_batch_size": 2}),
    "delta net, dp2 zero3": (2, DELTA, ZERO3 | OVERLAP),
    "delta net, muon, dp2 tp2 zero1": (4, DELTA | {"optimizer": "muon"}, TP2 | {"use_distributed_optimizer": True}),
    "delta net, recomputed core, cp2 tp2 sp": (4, DELTA, CP2 | TP2 | SP | {"recompute_granularity": "selective"}),
    "delta net, full recompute, pp2 zb_v": (2, IN_FOUR, PP2 | ZB_V | RECOMPUTE),
    "qwen3-next, dp2 ep2 zero3": (2, QWEN3_NEXT, EP2 | ZERO3),
    "qwen3-next, tp2 sp ep2 etp1": (2, QWEN3_NEXT, TP2 | SP | EP2 | ETP1),
    "qwen3-next, dropout, pp2 zb_h1": (
        2,
        QWEN3_NEXT | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        PP2 | ZB_H1,
    ),
    "qwen3-next, packed, a second token, cp2 dp2 ep2 zero1": (
        4,
        QWEN3_NEXT | PACKED | {"mtp_num_layers": 1},
        CP2 | EP2 | {"zero_stage": 1},
    ),
    "mamba, tp2": (2, MAMBA, TP2),
    "mamba, tp2 sp": (2, MAMBA, TP2 | SP),
    "mamba, pp2": (2, MAMBA, PP2),
    "mamba, two stages by the pattern, pp2": (2, MAMBA, PP2 | read_pattern("M|-*M")[1]),
    "mamba, four stages by the pattern, pp2": (2, MAMBA, PP2 | read_pattern("M|-|*|M")[1]),
    "mamba, two tokens ahead by the pattern, tp2 sp pp2": (
        4,
        MAMBA | {**read_pattern("M-*M/*-/*-")[1], "mtp_loss_scaling_factor": 0.5},
        TP2 | SP | PP2,
    ),
    "mamba, experts ahead, packed, cp2 ep2 zero1": (
        2,
        NEMOTRON_H | PACKED | read_pattern("ME*E/*E")[1],
        CP2 | EP2 | {"zero_stage": 1},
    ),
    "mamba, latent attention, tp2": (2, MAMBA | LATENT, TP2),
    "mamba, cp2": (2, MAMBA, CP2),
    "mamba, cp4, parts of 4 tokens": (4, MAMBA | {"seq_length": 32}, {"context_parallel_size": 4}),
    "mamba, packed, cp2, micro-batches of 2": (2, MAMBA | PACKED, CP2 | {"micro_batch_size": 2}),
    "mamba, packed, tp2 sp": (2, MAMBA | PACKED, TP2 | SP),
    "mamba, dp2 zero3": (2, MAMBA, ZERO3 | OVERLAP),
    "mamba, muon, dp2 tp2 zero1": (4, MAMBA | {"optimizer": "muon"}, TP2 | {"use_distributed_optimizer": True}),
    "mamba, recomputed core and MLP, cp2 tp2 sp": (
        4,
        MAMBA,
        CP2 | TP2 | SP | {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")},
    ),
    "mamba, dropout, full recompute, pp2 zb_v": (2, MAMBA | {"hidden_dropout": 0.1}, PP2 | ZB_V | RECOMPUTE),
    "gated delta product, packed, tp2 sp": (2, PRODUCT | PACKED, TP2 | SP),
    "gated delta product, three updates, cp2 tp2 zero3": (
        4,
        PRODUCT | {"gdp_num_householder": 3, "seq_length": 88},
        CP2 | TP2 | ZERO3,
    ),
    "mamba, delta net, tp2": (
        2,
        MAMBA
        | {"hybrid_layer_pattern": "MG*-"}
        | {name: DELTA[name] for name in DELTA if name[:7] == "linear_"}
        | {"linear_attention_freq": None},
        TP2,
    ),
    "mamba, delta net, three chunks, tp2 sp": (
        2,
        MAMBA
        | {"hybrid_layer_pattern": "MG", "num_layers": 2, "seq_length": 130, "global_batch_size": 2, "train_iters": 3}
        | {name: DELTA[name] for name in DELTA if name[:7] == "linear_"}
        | {"linear_attention_freq": None},
        TP2 | SP,
    ),
    "bamba, tp2 sp": (2, BAMBA, TP2 | SP),
    "bamba, cp2": (2, BAMBA, CP2),
    "falcon-h1, tp2": (2, FALCON_H1, TP2),
    "falcon-h1, tp2 sp": (2, FALCON_H1, TP2 | SP),
    "falcon-h1, norm before the gate, pp2 zb_v": (
        2,
        FALCON_H1 | {"mamba_output_norm": "before_gate"},
        PP2 | ZB_V,
    ),
    "falcon-h1, packed, cp2": (2, FALCON_H1 | PACKED, CP2),
    "falcon-h1, dp2 zero3": (2, FALCON_H1, ZERO3 | OVERLAP),
    "falcon-h1, dropout, recomputed core and MLP, cp2 tp2 sp": (
        4,
        FALCON_H1 | {"hidden_dropout": 0.1, "hybrid_layer_pattern": "HHH-"},
        CP2 | TP2 | SP | {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")},
    ),
    "falcon-h1, full recompute, pp2": (2, FALCON_H1, PP2 | RECOMPUTE),
    "nemotron-h, dp2 ep2 zero3": (2, NEMOTRON_H, EP2 | ZERO3),
    "nemotron-h, tp2 sp ep2 etp1": (2, NEMOTRON_H, TP2 | SP | EP2 | ETP1),
    "nemotron-h, packed, cp2 dp2 ep2 zero1": (4, NEMOTRON_H | PACKED, CP2 | EP2 | {"zero_stage": 1}),
    "nemotron-h, pp2 zb_h1": (2, NEMOTRON_H, PP2 | ZB_H1),
    "granite 4, tp2 sp ep2 etp1": (2, GRANITE_4, TP2 | SP | EP2 | ETP1),
    "granite 4, packed, cp2 pp2": (4, GRANITE_4 | PACKED, CP2 | PP2),
    "lfm2, tp2": (2, LFM2, TP2),
    "lfm2, tp2 sp": (2, LFM2, TP2 | SP),
    "lfm2, cp2": (2, LFM2, CP2),
    "lfm2, cp4, parts of 2 tokens": (4, LFM2 | {"seq_length": 16}, {"context_parallel_size": 4}),
    "lfm2, packed, cp2, micro-batches of 2": (2, LFM2 | PACKED, CP2 | {"micro_batch_size": 2}),
    "lfm2, packed, tp2 sp": (2, LFM2 | PACKED, TP2 | SP),
    "lfm2, dp2 zero3": (2, LFM2, ZERO3 | OVERLAP),
    "lfm2, muon, dp2 tp2 zero1": (4, LFM2 | {"optimizer": "muon"}, TP2 | {"use_distributed_optimizer": True}),
    "lfm2, recomputed core and MLP, cp2 tp2 sp": (
        4,
        LFM2,
        CP2 | TP2 | SP | {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")},
    ),
    "lfm2, dropout, full recompute, pp2 zb_v": (2, LFM2 | {"hidden_dropout": 0.1}, PP2 | ZB_V | RECOMPUTE),
    "lfm2 with experts, tp2 sp ep2 etp1": (2, LFM2_MOE, TP2 | SP | EP2 | ETP1),
    "lfm2 with experts, packed, cp2 dp2 ep2 zero1": (4, LFM2_MOE | PACKED, CP2 | EP2 | {"zero_stage": 1}),
    "kimi linear, tp2": (2, KIMI, TP2),
    "kimi linear, tp2 sp ep2 etp1": (2, KIMI, TP2 | SP | EP2 | ETP1),
    "kimi linear, packed, cp2": (2, KIMI | PACKED, CP2),
    "kimi linear, dp2 ep2 zero3": (2, KIMI, EP2 | ZERO3),
    "kimi linear, pp2 zb_h1": (2, KIMI, PP2 | ZB_H1),
    "kimi linear, recomputed core, cp2 tp2 sp": (
        4,
        KIMI,
        CP2 | TP2 | SP | {"recompute_granularity": "selective"},
    ),
}
