"""Rows of the parity matrix with multi-latent attention, in the form of ``rows.ROWS``."""

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

LATENT_ROWS: dict[str, tuple[int, dict, dict]] = {
    "latent attention, tp2": (2, LATENT, TP2),
    "latent attention, tp2 sp": (2, LATENT, TP2 | SP),
    "latent attention, queries without latent, dp2 pp2 zb_v zero3": (4, DIRECT, PP2 | ZB_V | {"zero_stage": 3}),
    "deepseek, tp2 sp ep2 etp1, recompute": (2, DEEPSEEK_V3, TP2 | SP | EP2 | ETP1 | RECOMPUTE),
    "deepseek, dp4 ep2 zero1, overlap": (4, DEEPSEEK_V3, EP2 | {"zero_stage": 1} | OVERLAP),
}
