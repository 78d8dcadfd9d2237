"""Rows of the parity matrix with gated delta nets, in the form of ``rows.ROWS``."""

from __future__ import annotations

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
RECURRENT_ROWS: dict[str, tuple[int, dict, dict]] = {
    "delta net, tp2": (2, DELTA, TP2),
    "delta net, tp2 sp": (2, DELTA, TP2 | SP),
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
