"""Rows of the parity matrix with latent attention and multi-token prediction, in the form of ``rows.ROWS``."""

from __future__ import annotations

from tests.parity.moe_rows import DEEPSEEK, EP2, ETP1, OVERLAP, PP2, RECOMPUTE, SP, TP2, ZB_V

LATENT = {
    "num_layers": 2,
    "global_batch_size": 4,
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "qk_layernorm": True,
}
DIRECT = LATENT | {"q_lora_rank": None, "qk_layernorm": False, "num_layers": 4, "v_head_dim": 4}
DEEPSEEK_V3 = LATENT | DEEPSEEK

LATER = {
    "num_layers": 3,
    "global_batch_size": 4,
    "position_embedding_type": "rope",
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.6,
}
REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
MIXED_DEPTHS = {"mtp_num_layers": 3, "mtp_hsm": True}
UNTIED = {"untie_embeddings_and_output_weights": True}
ALL_PARTS = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts")
ROPE_PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}

LATENT_ROWS: dict[str, tuple[int, dict, dict]] = {
    "latent attention, tp2": (2, LATENT, TP2),
    "latent attention, tp2 sp": (2, LATENT, TP2 | SP),
    "latent attention, queries without latent, dp2 pp2 zb_v zero3": (4, DIRECT, PP2 | ZB_V | {"zero_stage": 3}),
    "deepseek, tp2 sp ep2 etp1, recompute": (2, DEEPSEEK_V3, TP2 | SP | EP2 | ETP1 | RECOMPUTE),
    "multi-token prediction, micro-batches of 2": (1, LATER, {"micro_batch_size": 2}),
    "multi-token prediction, tp2 sp": (2, LATER, TP2 | SP),
    "multi-token prediction, tp2 sp, mixed": (2, LATER | MIXED_DEPTHS, TP2 | SP),
    "multi-token prediction, dp2": (2, LATER, {}),
    "multi-token prediction, pp2": (2, LATER, PP2),
    "multi-token prediction, untied, pp2": (2, LATER | UNTIED, PP2),
    "multi-token prediction, untied, dp2 pp2 zb_v zero3": (
        4,
        LATER | UNTIED | {"num_layers": 4},
        PP2 | ZB_V | {"zero_stage": 3},
    ),
    "a repeated layer of multi-token prediction, dp2 zero3, recompute": (
        2,
        LATER | REPEATED,
        RECOMPUTE | {"zero_stage": 3} | OVERLAP,
    ),
    "a repeated layer of multi-token prediction, untied, dp2 pp2 zb_v zero3": (
        4,
        LATER | REPEATED | UNTIED | {"num_layers": 4},
        PP2 | ZB_V | {"zero_stage": 3},
    ),
    "a repeated layer of multi-token prediction with experts, tp2 sp ep2 etp1": (
        2,
        DEEPSEEK_V3 | REPEATED,
        TP2 | SP | EP2 | ETP1,
    ),
    "multi-token prediction, packed, untied, dp2 zero3, recompute": (
        2,
        LATER | UNTIED | ROPE_PACKED,
        RECOMPUTE | {"zero_stage": 3} | OVERLAP,
    ),
    "deepseek with a second token, dp2 pp2 ep2 zero1": (
        4,
        DEEPSEEK_V3 | UNTIED | {"mtp_num_layers": 1},
        PP2 | EP2 | {"zero_stage": 1} | {"pipeline_model_parallel_layout": "Ett|tmL"},
    ),
    "deepseek, selective recompute of all parts, tp2 sp ep2 etp1": (
        2,
        DEEPSEEK_V3,
        TP2 | SP | EP2 | ETP1 | {"recompute_granularity": "selective", "recompute_modules": ALL_PARTS},
    ),
    "deepseek, recomputed norms and activations, dp2 pp2 zb_v zero3": (
        4,
        DEEPSEEK_V3 | {"num_layers": 4, "moe_layer_freq": (0, 1, 1, 1)},
        PP2
        | ZB_V
        | {"zero_stage": 3, "recompute_granularity": "selective"}
        | {"recompute_modules": ("layernorm", "mla_up_proj", "moe_act")},
    ),
    "deepseek, dp4 ep2 zero1, overlap": (4, DEEPSEEK_V3, EP2 | {"zero_stage": 1} | OVERLAP),
}
