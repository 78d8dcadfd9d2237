"""Rows of the parity matrix with sparse attention, in the form of ``rows.ROWS``."""

from __future__ import annotations

from tests.parity.latent_rows import LATENT
from tests.parity.moe_rows import CP2, DEEPSEEK, EP2, ETP1, OVERLAP, PP2, RECOMPUTE, SP, TP2, ZB_H1, ZB_V
from tests.parity.recurrent_rows import NO_DROPOUT, PACKED, ZERO3

INDEXER = {
    "experimental_attention_variant": "dsa",
    "position_embedding_type": "rope",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 6,
    "dsa_indexer_topk": 5,
    "dsa_indexer_loss_coeff": 0.7,
    "cp_comm_type": ("all_gather",),
    **NO_DROPOUT,
}
DSA = LATENT | INDEXER
WARMUP = {"dsa_indexer_warmup": True}
SPARSE = DSA | {"dsa_indexer_use_sparse_loss": True}
DEEPSEEK_V32 = LATENT | DEEPSEEK | INDEXER | {"dsa_indexer_use_sparse_loss": True}

HEADS = {"linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
OF_LAYERS = SPARSE | HEADS | {"normalization": "RMSNorm", "global_batch_size": 4}

SPARSE_ROWS: dict[str, tuple[int, dict, dict]] = {
    "sparse attention, tp2": (2, SPARSE, TP2),
    "sparse attention, tp2 sp": (2, SPARSE, TP2 | SP),
    "sparse attention, pp2": (2, SPARSE, PP2),
    "sparse attention, cp2": (2, SPARSE, CP2),
    "sparse attention, dp2 zero3": (2, SPARSE, ZERO3 | OVERLAP),
    "sparse attention, dense loss, tp2": (2, DSA, TP2),
    "sparse attention, dense loss, cp2 tp2 sp": (4, DSA, CP2 | TP2 | SP),
    "sparse attention, packed, cp2": (2, SPARSE | PACKED, CP2),
    "sparse attention, packed, tp2 sp": (2, DSA | PACKED, TP2 | SP),
    "sparse attention, micro-batches of 2": (1, SPARSE | PACKED, {"micro_batch_size": 2}),
    "sparse attention, indexers not trained, dp2 tp2 zero3": (
        4,
        DSA | {"dsa_indexer_loss_coeff": 0.0, "q_lora_rank": None},
        TP2 | ZERO3,
    ),
    "sparse attention, warm-up, cp2 tp2 sp": (4, DSA | WARMUP, CP2 | TP2 | SP),
    "sparse attention, warm-up, dp2 pp2 zero3": (4, DSA | WARMUP, PP2 | ZERO3),
    "sparse attention, recomputed core, cp2 tp2 sp": (
        4,
        SPARSE | {"attention_backend": "unfused"},
        CP2 | TP2 | SP | {"recompute_granularity": "selective"},
    ),
    "sparse attention, full recompute, pp2 zb_v": (2, SPARSE | {"num_layers": 4}, PP2 | ZB_V | RECOMPUTE),
    "sparse attention and delta nets, pp2": (2, OF_LAYERS | {"hybrid_layer_pattern": "G*-*", "num_layers": 4}, PP2),
    "sparse attention and delta nets, packed, cp2 tp2 sp": (
        4,
        OF_LAYERS | PACKED | {"hybrid_layer_pattern": "*-G", "num_layers": 3},
        CP2 | TP2 | SP,
    ),
    "sparse attention in a pattern, warm-up, dp2 zero3": (
        2,
        DSA | WARMUP | {"hybrid_layer_pattern": "-*", "num_layers": 2},
        ZERO3,
    ),
    "deepseek-v3.2, dp2 ep2 zero3": (2, DEEPSEEK_V32, EP2 | ZERO3),
    "deepseek-v3.2, tp2 sp ep2 etp1": (2, DEEPSEEK_V32, TP2 | SP | EP2 | ETP1),
    "deepseek-v3.2, a second token, cp2 pp2 zb_h1": (
        4,
        DEEPSEEK_V32 | PACKED | {"mtp_num_layers": 1, "num_layers": 3, "moe_layer_freq": (0, 1, 1)},
        CP2 | PP2 | ZB_H1 | {"pipeline_model_parallel_layout": "Ett|tmL"},
    ),
}
