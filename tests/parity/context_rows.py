"""Rows of the parity matrix in which sequences are split over context-parallel ranks."""

from __future__ import annotations

from tests.parity.latent_rows import LATENT, LATER, MIXED_DEPTHS
from tests.parity.moe_rows import MIXTRAL, MOE_ROWS
from tests.parity.rows import (
    FULL_BLOCK,
    FULL_UNIFORM,
    FUSED_LOSS,
    GPIPE,
    GQA1,
    GQA2,
    MODERN,
    OVERLAP,
    PACKED,
    PP2,
    SDPA,
    SMALL_BUCKETS,
    SP,
    TP2,
    UNTIED,
    V2,
    ZB_H1,
    ZB_V,
    ZERO,
)

CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
GATHER, HEADS = {"cp_comm_type": ("all_gather",)}, {"cp_comm_type": ("a2a",)}
NESTED = {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)}
MIXED = {"cp_comm_type": ("a2a", "p2p")}
SELECTIVE = {"recompute_granularity": "selective"}
SMALL = {"num_layers": 2, "global_batch_size": 4}  # the fourth sample has no unmasked token
LAYERS4 = {"num_layers": 4}
WINDOW = {"window_size": (4, 0), "window_attn_skip_freq": (1, 0)}
THIRDS = {"hidden_size": 24, "num_attention_heads": 3, "seq_length": 24}  # both chunks of tokens on the second rank
LONGER = {"seq_length": 48}
MICRO2 = {"micro_batch_size": 2}
GROWING = {"seq_length_warmup": (8, 4, 6), "global_batch_size": 4}
ROPE = {"position_embedding_type": "rope"}
DYNAMIC = {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 4}
DYNAMIC8 = DYNAMIC | {"max_seqlen_per_dp_cp_rank": 8}

# name: (world size, settings of both sides, additional settings of the layout), as in ``rows.ROWS``
CONTEXT_ROWS: dict[str, tuple[int, dict, dict]] = {
    # the kinds of communication, with dropout on the weights and without
    "cp2 p2p": (2, ROPE, CP2),  # C23 C24 C26
    "cp2 all_gather": (2, {}, CP2 | GATHER),
    "cp2 a2a": (2, {}, CP2 | HEADS),
    "cp4 a2a+p2p": (4, ROPE, CP4 | NESTED),
    "cp2 p2p, fused": (2, SDPA, CP2),
    "cp4 p2p, fused, 2 groups": (4, SDPA | GQA2 | ROPE, CP4),
    "cp4 all_gather, fused, 2 groups": (4, SDPA | GQA2 | ROPE, CP4 | GATHER),
    "cp4 a2a, fused, 2 groups": (4, SDPA | GQA2 | ROPE, CP4 | HEADS),
    "cp4 a2a, 1 group": (4, GQA1, CP4 | HEADS),
    "cp4 a2a+p2p, fused, modern, 1 group": (4, MODERN | SDPA | GQA1, CP4 | NESTED),
    "cp2 a2a and p2p by layer": (2, ROPE, CP2 | MIXED),
    "cp2 p2p, unfused": (2, SDPA | {"attention_backend": "unfused"}, CP2),
    "cp2 p2p, bounded scores": (2, SDPA | {"attn_logit_softcapping": 2.0}, CP2),
    "cp4 a2a+p2p, bounded scores, dropout": (4, {"attn_logit_softcapping": 2.0}, CP4 | NESTED),
    # windows and documents
    "cp2 p2p, window": (2, MODERN | SDPA | WINDOW | LONGER, CP2),
    "cp4 p2p, window, dropout": (4, MODERN | WINDOW, CP4),
    "cp2 a2a, window, dropout": (2, MODERN | WINDOW, CP2 | HEADS),
    "cp2 p2p, packed": (2, PACKED | MODERN | SDPA, CP2 | MICRO2),  # C25 C45
    "cp2 all_gather, packed, dropout": (2, PACKED, CP2 | GATHER | MICRO2),  # C25 C45
    "cp2 a2a, packed": (2, PACKED | MODERN | SDPA, CP2 | HEADS | MICRO2),  # C45
    "cp4 a2a+p2p, packed, window": (4, PACKED | MODERN | SDPA | WINDOW | LONGER, CP4 | NESTED),
    "cp2 p2p, positions restart": (2, PACKED | MODERN | SDPA | {"reset_attention_mask": False}, CP2 | MICRO2),
    # with the other axes
    "cp2 tp2": (4, MODERN | GQA2, CP2 | TP2),
    "cp2 tp2 sp": (4, MODERN | GQA2, CP2 | TP2 | SP),  # C17 C24
    "cp2 tp2 sp, learned positions": (4, {}, CP2 | TP2 | SP),  # C17 C24
    "cp2 tp2 sp a2a, dropout": (4, {}, CP2 | TP2 | SP | HEADS),  # C26
    "cp2 tp2 sp, fused loss": (4, {}, CP2 | TP2 | SP | FUSED_LOSS),
    "cp2 pp2": (4, {}, CP2 | PP2),
    "cp2 pp2 gpipe": (4, {}, CP2 | PP2 | GPIPE),
    "cp2 pp2 x 2 chunks": (4, LAYERS4, CP2 | PP2 | V2),
    "cp2 pp2 zb_h1": (4, UNTIED, CP2 | PP2 | ZB_H1),
    "cp2 pp2 zb_v": (4, LAYERS4, CP2 | PP2 | ZB_V),
    "cp2 dp2": (4, {}, CP2),  # C3 C4
    "cp2 zero1": (2, {}, CP2 | ZERO),
    "cp2 zero2 in 2 instances": (2, {}, CP2 | {"zero_stage": 2, "num_distributed_optimizer_instances": 2}),  # C62
    "cp2 dp2 zero1, overlap": (4, {}, CP2 | ZERO | OVERLAP | SMALL_BUCKETS),
    "cp2 tp2 pp2 sp": (8, MODERN, CP2 | TP2 | PP2 | SP),
    "cp2 dp2 tp2 sp zero1": (8, MODERN, CP2 | TP2 | SP | ZERO | OVERLAP),
    "cp4 dp2 zero1, packed": (8, PACKED, CP4 | ZERO),
    "cp4 pp2 zb_v a2a+p2p": (8, LAYERS4, CP4 | PP2 | ZB_V | NESTED),
    "cp2 pp2 dp2, rank order": (8, {}, CP2 | PP2 | {"rank_order": "tp-pp-dp-cp-ep"}),  # C50
    # latent attention, whose values have fewer or more channels than keys
    "cp2 p2p, latent attention": (2, LATENT | SDPA, CP2),
    "cp2 tp2 sp all_gather, latent attention, dropout": (4, LATENT, CP2 | TP2 | SP | GATHER),
    "cp2 a2a, latent attention": (2, LATENT | SDPA | {"v_head_dim": 12}, CP2 | HEADS),
    "cp2 tp2 sp, multi-token prediction": (4, LATER, CP2 | TP2 | SP),
    "cp2 tp2 sp, packed, mixed multi-token prediction": (
        4,
        PACKED | MODERN | LATER | MIXED_DEPTHS,
        CP2 | TP2 | SP | MICRO2,
    ),
    "cp2 tp3 sp, mixed multi-token prediction": (
        6,
        LATER | MIXED_DEPTHS | THIRDS,
        CP2 | SP | {"tensor_model_parallel_size": 3},
    ),
    "cp2, experts, multi-token prediction from token 0": (2, MIXTRAL | LATER | {"mtp_zero_last_input": True}, CP2),
    # a number of ranks for each document
    "documents over dp2": (2, PACKED, DYNAMIC8),
    "documents over cp2 dp2, gathered keys": (4, PACKED, DYNAMIC | CP2 | GATHER),
    "documents over dp4, fused, zero1, overlap": (4, PACKED | MODERN | SDPA, DYNAMIC | ZERO | OVERLAP | SMALL_BUCKETS),
    "documents over dp2, tp2 sp, 2 groups": (4, PACKED | MODERN | GQA2, DYNAMIC8 | TP2 | SP),
    "documents over dp2, tp2 sp, positions of samples": (
        4,
        PACKED | {"reset_position_ids": False},
        DYNAMIC8 | TP2 | SP | MICRO2,
    ),
    "documents over cp2 dp2, latent attention": (4, PACKED | LATENT, DYNAMIC8 | CP2),
    "documents over dp4, at least 2 ranks, selective recompute": (
        4,
        PACKED,
        DYNAMIC8 | SELECTIVE | {"min_dynamic_context_parallel_size": 2},
    ),
    "documents over dp4, window, full recompute": (4, PACKED | MODERN | WINDOW, DYNAMIC | FULL_UNIFORM),
    "samples over cp2 dp2": (4, {}, DYNAMIC | CP2),
    # recomputation, growing sequences
    "cp2 p2p, full recompute": (2, {}, CP2 | FULL_UNIFORM),  # C27
    "cp2 a2a pp2, full recompute": (4, {}, CP2 | PP2 | HEADS | FULL_BLOCK),
    "cp2 p2p, selective recompute": (2, {}, CP2 | SELECTIVE),  # C27
    "cp2 all_gather, growing": (2, GROWING, CP2 | GATHER),
}
CONTEXT_ROWS = {name: (size, SMALL | model, layout) for name, (size, model, layout) in CONTEXT_ROWS.items()}
for _name, _size in {
    "experts, ep2": 2,
    "experts, etp2, allgather": 4,
    "bias and groups, tp2 sp ep2 etp1, recompute": 4,
    "balance of micro-batches, tp2 sp": 4,
    "balance of the global batch, tp2 sp": 4,
}.items():
    CONTEXT_ROWS[f"cp2, {_name}"] = _size, MOE_ROWS[_name][1], MOE_ROWS[_name][2] | CP2
