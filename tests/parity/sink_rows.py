"""Rows of the parity matrix with the pieces of gpt-oss, in the form of ``rows.ROWS``: attention sinks, windows in every
second layer, experts with biases and bounded activations."""

from __future__ import annotations

from tests.parity.moe_rows import CP2, EP2, ETP1, PP2, SMALL, SP, TP2, ZB_H1

SINKS = {"softmax_type": "learnable"}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
GPT_OSS = {
    **{name: value for name, value in SMALL.items() if name not in ("swiglu", "disable_bias_linear")},
    **SINKS,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.3,  # small enough to bound some of the inner features
    "window_size": (3, 0),
    "window_attn_skip_freq": (2,),
    "group_query_attention": True,
    "num_query_groups": 2,
    "moe_aux_loss_coeff": 0.1,
}
FUSED = GPT_OSS | NO_DROPOUT
HEADS = {"cp_comm_type": ("a2a",)}
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}
ZERO3 = {"zero_stage": 3}
DENSE = {"num_layers": 2, "global_batch_size": 4, "position_embedding_type": "rope"}

SINK_ROWS: dict[str, tuple[int, dict, dict]] = {
    "gpt-oss, tp2": (2, GPT_OSS, TP2),
    "gpt-oss, tp2 sp ep2 etp1": (2, FUSED, TP2 | SP | EP2 | ETP1),
    "gpt-oss, pp2 zb_h1": (2, FUSED, PP2 | ZB_H1),
    "gpt-oss, dp2 ep2 zero3": (2, FUSED, EP2 | ZERO3),
    "gpt-oss, cp2 p2p": (2, FUSED, CP2),
    "gpt-oss, cp2 a2a, dropout": (2, GPT_OSS, CP2 | HEADS),
    "gpt-oss, packed, cp2 tp2": (4, FUSED | PACKED, CP2 | TP2),
    "sinks, muon, experts with biases, dp2 tp2 zero1": (
        4,
        FUSED | {"optimizer": "muon"},
        TP2 | {"use_distributed_optimizer": True},
    ),
    "sinks of 0, dropout, tp2 sp": (2, DENSE | {"softmax_type": "off-by-one"}, TP2 | SP),
    "sinks, micro-batches of 2": (1, DENSE | SINKS | NO_DROPOUT, {"micro_batch_size": 2}),
    "sinks, unfused, tp2": (2, DENSE | SINKS | NO_DROPOUT, TP2 | {"attention_backend": "unfused"}),
}
