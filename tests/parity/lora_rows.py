"""Rows of the parity matrix with low-rank adapters, in the form of ``rows.ROWS``."""

from __future__ import annotations

from tests.parity.context_rows import CP2
from tests.parity.latent_rows import LATENT
from tests.parity.moe_rows import DEEPSEEK, EP2, ETP1, ETP2, MIXTRAL
from tests.parity.recurrent_rows import DELTA, KIMI
from tests.parity.recurrent_rows import PACKED as RECURRENT_PACKED
from tests.parity.rows import FULL_BLOCK, GQA1, GQA2, MODERN, OVERLAP, PACKED, PP2, SP, TP2, TP4, ZB_H1, ZERO, ZERO3

SMALL = {"num_layers": 2, "global_batch_size": 4}
LORA = SMALL | {"lora_rank": 3, "lora_alpha": 6.0, "lora_dropout": 0.1}
PARTS = LORA | {"lora_target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")}
ONE_NORM = {"parallel_residual": True, "parallel_residual_shared_norm": True}
ONE_NORM |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DORA = {"use_dora": True, "use_rslora": True}
OF_EXPERTS = MIXTRAL | {"lora_rank": 3, "lora_target_modules": ("q_proj", "gate_proj", "up_proj", "down_proj")}
SHARED = DEEPSEEK | {"lora_rank": 3, "global_batch_size": 4}
OF_LATENTS = LATENT | LORA | {"lora_dropout": 0.0}

DELTA_PARTS = {
    "lora_rank": 3,
    "use_dora": True,
    "lora_target_modules": ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj"),
}
KIMI_PARTS = {
    "lora_rank": 3,
    "lora_target_modules": ("q_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj"),
}

LORA_ROWS: dict[str, tuple[int, dict, dict]] = {
    "lora, tp2": (2, LORA, TP2),
    "lora, tp2 sp": (2, LORA, TP2 | SP),
    "dora, modern, parts, 2 groups, tp2 sp": (2, MODERN | GQA2 | PARTS | DORA, TP2 | SP),
    "dora, modern, parts, 1 group, tp2": (2, MODERN | GQA1 | PARTS | DORA, TP2),
    "dora, 1 group, tp4": (4, GQA1 | LORA | DORA, TP4),
    "lora, one norm of attention and MLP, tp2": (2, LORA | ONE_NORM, TP2),
    "lora, one norm of attention and MLP, tp2 sp": (2, LORA | ONE_NORM, TP2 | SP),
    "lora, pp2, recompute": (2, LORA, PP2 | FULL_BLOCK),
    "lora of the last layer, pp2 zb_h1": (
        2,
        LORA | {"lora_target_modules": ("*.layers.1.mlp.linear_fc2", "*.layers.1.*.linear_qkv")},
        PP2 | ZB_H1,
    ),
    "lora, dp2 zero1": (2, LORA, ZERO),
    "dora, dp2 zero3, overlap": (2, LORA | DORA, ZERO3 | OVERLAP),
    "lora, packed, cp2": (2, PACKED | LORA, CP2),
    "lora of experts, ep2": (2, OF_EXPERTS, EP2),
    "lora of experts, tp2 etp2": (2, OF_EXPERTS, TP2 | ETP2),
    "lora of shared experts, tp2 sp ep2 etp1": (2, SHARED, TP2 | SP | EP2 | ETP1),
    "lora of latents, tp2 sp": (2, OF_LATENTS, TP2 | SP),
    "lora of latents, tp2": (2, OF_LATENTS, TP2),
    "lora of delta nets, tp2 sp": (2, DELTA | LORA, TP2 | SP),
    "dora of parts of delta nets, tp2": (2, DELTA | DELTA_PARTS, TP2),
    "lora of delta nets, packed, cp2": (2, DELTA | RECURRENT_PACKED | LORA, CP2),
    "lora of delta nets, dp2 zero3": (2, DELTA | DELTA_PARTS, ZERO3 | OVERLAP),
    "lora of kimi delta attention, tp2 sp": (2, KIMI | KIMI_PARTS, TP2 | SP),
}
