"""Rows of the parity matrix with pieces of published architectures, in the form of ``rows.ROWS``: factors on layers,
softmax scores with a bias, groups chosen by their best expert."""

from __future__ import annotations

from tests.parity.latent_rows import LATENT
from tests.parity.moe_rows import CP2, EP2, ETP1, PP2, RECOMPUTE, SMALL, SP, TP2

ZERO3 = {"zero_stage": 3}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
GRANITE = {
    "num_layers": 2,
    "global_batch_size": 4,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logit_multiplier": 0.25,
    "softmax_scale": 0.2,
}
ERNIE = SMALL | {
    "moe_layer_freq": (0, 1),
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_shared_expert_intermediate_size": 16,
    "rotary_interleaved": True,
    "moe_aux_loss_coeff": 0.1,
}
DEEPSEEK_V2 = (
    LATENT
    | SMALL
    | {
        "num_experts": 8,
        "moe_router_topk": 3,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_group_score_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 16,
        "moe_aux_loss_coeff": 0.1,
    }
)
LLAMA4 = SMALL | {
    "moe_layer_freq": (0, 1),
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_apply_probs_on_input": True,
    "moe_shared_expert_intermediate_size": 16,
    "rotary_interleaved": True,
    "qk_l2_norm": True,
    "qk_l2_norm_rotary_only": True,
    "no_rope_freq": (0, 1),
    "attention_chunk_size": 5,
    "query_temperature_scale": 0.3,
    "query_temperature_floor": 3,
}
PHIMOE = SMALL | {
    "normalization": "LayerNorm",
    "add_qkv_bias": True,
    "add_attention_output_bias": True,
    "untie_embeddings_and_output_weights": True,
    "add_output_layer_bias": True,
    "num_experts": 8,
    "moe_router_score_function": "sparsemixer",
    "moe_sparsemixer_threshold": 0.3,
    "moe_aux_loss_coeff": 0.1,
}
SAMPLED = PHIMOE | {"moe_sparsemixer_sampling": True, "moe_sparsemixer_threshold": 0.8}
COHERE = GRANITE | {
    "normalization": "LayerNorm",
    "disable_bias_layernorm": True,
    "disable_bias_linear": True,
    "parallel_residual": True,
    "parallel_residual_shared_norm": True,
    "qk_layernorm": True,
    "qk_layernorm_weight_per_head": True,
    "rotary_interleaved": True,
}
COHERE2 = COHERE | {
    "num_layers": 4,
    "qk_layernorm": False,
    "qk_layernorm_weight_per_head": False,
    "window_size": (3, 0),
    "window_attn_skip_freq": (1, 1, 1, 0),
    "no_rope_freq": (0, 0, 0, 1),
}
PHI = {
    "num_layers": 4,
    "global_batch_size": 4,
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "parallel_residual": True,
    "parallel_residual_shared_norm": True,
    "untie_embeddings_and_output_weights": True,
    "add_output_layer_bias": True,
}
LONGROPE = {
    "num_layers": 2,
    "global_batch_size": 4,
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "use_rope_scaling": True,
    "rope_scaling_type": "longrope",
    "original_max_position_embeddings": 8,
    "longrope_short_factor": (1.0, 1.5),
    "longrope_long_factor": (2.0, 5.0),
}
ONE_NORM_AND_EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_aux_loss_coeff": 0.1,
}
NORMS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
EXACT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}
HEADS = {"cp_comm_type": ("a2a",)}

NANOCHAT = {
    "num_layers": 2,
    "global_batch_size": 4,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "squared_relu": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "disable_bias_linear": True,
    "disable_weight_layernorm": True,
    "embedding_layernorm": True,
    "qk_l2_norm": True,
    "final_logit_softcapping": 3.0,
}
HUNYUAN = GRANITE | {"qk_layernorm": True, "qk_layernorm_after_rotary": True, "disable_bias_linear": True}
MINISTRAL3 = GRANITE | {
    "query_temperature_scale": 0.3,
    "query_temperature_floor": 3,
    "query_temperature_of_rotary": True,
}
APERTUS = {name: value for name, value in HUNYUAN.items() if name not in ("swiglu", "qk_layernorm_after_rotary")}
APERTUS |= {"xielu": True}
BLOOM = {
    "num_layers": 2,
    "global_batch_size": 4,
    "position_embedding_type": "alibi",
    "embedding_layernorm": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
OPT = {"num_layers": 2, "global_batch_size": 4, "relu": True}
EMBEDDING_NORM = {"num_layers": 2, "global_batch_size": 4, "embedding_layernorm": True}
HUB_ROWS: dict[str, tuple[int, dict, dict]] = {
    "nanochat, tp2 sp": (2, NANOCHAT, TP2 | SP),
    "nanochat, cp2": (2, NANOCHAT | NO_DROPOUT, CP2),
    "nanochat, dp2 zero3": (2, NANOCHAT, ZERO3),
    "nanochat, full recompute, pp2": (2, NANOCHAT, PP2 | RECOMPUTE),
    "norm of embeddings, tp2 sp": (2, EMBEDDING_NORM, TP2 | SP),
    "norm of embeddings, untied, pp2": (2, EMBEDDING_NORM | {"untie_embeddings_and_output_weights": True}, PP2),
    "hunyuan, tp2 sp": (2, HUNYUAN, TP2 | SP),
    "ministral 3, cp2": (2, MINISTRAL3 | NO_DROPOUT, CP2),
    "apertus, tp2 sp": (2, APERTUS, TP2 | SP),
    "apertus, cp2": (2, APERTUS | NO_DROPOUT, CP2),
    "apertus, dp2 zero3": (2, APERTUS, ZERO3),
    "apertus, full recompute, pp2": (2, APERTUS, PP2 | RECOMPUTE),
    "bloom, tp2 sp": (2, BLOOM, TP2 | SP),
    "bloom, pp2": (2, BLOOM, PP2),
    "bloom, cp2 p2p": (2, BLOOM | NO_DROPOUT, CP2),
    "bloom, cp2 a2a, dropout": (2, BLOOM, CP2 | HEADS),
    "bloom, packed, cp2 tp2": (4, BLOOM | NO_DROPOUT | PACKED, CP2 | TP2),
    "bloom, dp2 zero3": (2, BLOOM, ZERO3),
    "opt, tp2 sp": (2, OPT, TP2 | SP),
    "granite, tp2": (2, GRANITE, TP2),
    "granite, tp2 sp": (2, GRANITE, TP2 | SP),
    "granite, pp2": (2, GRANITE, PP2),
    "granite, cp2": (2, GRANITE, CP2),
    "granite, dp2 zero3": (2, GRANITE, ZERO3),
    "ernie, tp2 sp ep2 etp1": (2, ERNIE, TP2 | SP | EP2 | ETP1),
    "ernie, dp2 ep2 zero3": (2, ERNIE, EP2 | ZERO3),
    "ernie, cp2": (2, ERNIE, CP2),
    "llama 4, tp2 sp ep2 etp1": (2, LLAMA4, TP2 | SP | EP2 | ETP1),
    "llama 4, pp2": (2, LLAMA4 | EXACT, PP2),
    "llama 4, cp2 p2p": (2, LLAMA4 | EXACT, CP2),
    "llama 4, cp2 a2a, dropout": (2, LLAMA4, CP2 | HEADS),
    "llama 4, packed, cp2 tp2": (4, LLAMA4 | EXACT | PACKED, CP2 | TP2),
    "llama 4, dp2 ep2 zero3": (2, LLAMA4 | EXACT, EP2 | ZERO3),
    "phi-3.5-moe, tp2": (2, PHIMOE, TP2),
    "phi-3.5-moe, tp2 sp ep2 etp1": (2, PHIMOE, TP2 | SP | EP2 | ETP1),
    "phi-3.5-moe, ep2": (2, PHIMOE, EP2),
    "phi-3.5-moe, dp2 zero3": (2, PHIMOE, ZERO3),
    "phi-3.5-moe, tied, pp2": (2, PHIMOE | {"untie_embeddings_and_output_weights": False}, PP2),
    "phi-3.5-moe, cp2": (2, PHIMOE, CP2),
    "phi-3.5-moe, drawn experts, tp2": (2, SAMPLED, TP2),
    "phi-3.5-moe, drawn experts, tp2 sp ep2 etp1": (2, SAMPLED, TP2 | SP | EP2 | ETP1),
    "phi-3.5-moe, drawn experts, ep2": (2, SAMPLED, EP2),
    "phi-3.5-moe, drawn experts, dp2 zero3": (2, SAMPLED, ZERO3),
    "phi-3.5-moe, drawn experts, full recompute, pp2": (2, SAMPLED, PP2 | RECOMPUTE),
    "phi-3.5-moe, drawn experts, cp2": (2, SAMPLED, CP2),
    "cohere, tp2": (2, COHERE, TP2),
    "cohere, tp2 sp": (2, COHERE, TP2 | SP),
    "cohere, tp2 sp, norms and MLPs recomputed": (2, COHERE, TP2 | SP | NORMS_AGAIN),
    "cohere, dp2 zero3": (2, COHERE, ZERO3),
    "cohere, experts, dp2 tp2 sp ep2 etp1": (4, COHERE | ONE_NORM_AND_EXPERTS, TP2 | SP | EP2 | ETP1),
    "cohere 2, pp2 x 2 chunks": (2, COHERE2, PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "cohere 2, pp2 zb_v, recompute": (2, COHERE2, PP2 | {"pipeline_schedule": "zb_v"} | FULL),
    "cohere 2, cp2": (2, COHERE2 | EXACT, CP2),
    "cohere without dropout, tp2": (2, COHERE | NO_DROPOUT, TP2),
    "cohere without dropout, full recompute, tp2 sp": (2, COHERE | NO_DROPOUT, TP2 | SP | RECOMPUTE),
    "cohere without dropout, tp2 sp, norms and MLPs recomputed": (2, COHERE | NO_DROPOUT, TP2 | SP | NORMS_AGAIN),
    "phi-2 without dropout, tp2 pp2 zb_h1": (4, PHI | NO_DROPOUT, TP2 | PP2 | {"pipeline_schedule": "zb_h1"}),
    "phi-2, tp2 pp2 zb_h1 sp": (4, PHI, TP2 | SP | PP2 | {"pipeline_schedule": "zb_h1"}),
    "phi-2, pp2 dualpipe_v": (2, PHI, PP2 | {"pipeline_schedule": "dualpipe_v"}),
    "phi-3 with longrope, cp2 tp2": (4, LONGROPE, CP2 | TP2),
    "phi-3 with longrope, cp2": (2, LONGROPE, CP2),
    "deepseek-v2, tp2": (2, DEEPSEEK_V2, TP2),
    "deepseek-v2, pp2": (2, DEEPSEEK_V2, PP2),
    "deepseek-v2, dp2 ep2 zero3": (2, DEEPSEEK_V2, EP2 | ZERO3),
}
