"""Configurations trained on a simulated GPU, by test: settings over ``BASE``."""

from __future__ import annotations

from tests.parity import rows
from tests.parity.context_rows import CP2, GATHER, HEADS
from tests.parity.fp8_rows import DELAYED
from tests.parity.latent_rows import ALL_PARTS, DEEPSEEK_V3, LATENT, LATER
from tests.parity.moe_rows import ALL_GATHER, DEEPSEEK, DROP, EP2, MIXTRAL, PADDED, PAIRS, SINKHORN
from tests.parity.recurrent_rows import DELTA, KIMI, MAMBA
from tests.parity.rows import GQA2, MODERN, PACKED, PP2, SDPA, SP, TP2, ZERO, ZERO2, ZERO3

BASE = rows.BASE | {
    "num_layers": 2,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "kernel_backend": "reference",
    "fp64": False,
}
BF16, OFFLOAD = {"bf16": True}, {"optimizer_cpu_offload": True}
OVERLAP = rows.OVERLAP | rows.SMALL_BUCKETS

ONE_RANK: dict[str, list[dict[str, object]]] = {
    # Not packed in bfloat16: variable-length attention rounds in other places (``test_document_attention``).
    "dense": [
        {},
        BF16 | MODERN | GQA2 | SDPA,
        MODERN | GQA2 | PACKED | SDPA,
        PACKED,
        {"fp16": True, "initial_loss_scale": 2.0**40},
    ],
    "losses": [rows.UNTIED | rows.FUSED_LOSS, {"cross_entropy_loss_fusion": True}, {"log_norms_by_layer": True}],
    "experts": [MIXTRAL | BF16, MIXTRAL | ALL_GATHER, DEEPSEEK, SINKHORN],
    "capacity": [MIXTRAL | DROP, MIXTRAL | PADDED],
    "latent": [LATENT, LATER, DEEPSEEK_V3 | {"recompute_granularity": "selective", "recompute_modules": ALL_PARTS}],
    "recurrent": [DELTA | PACKED, DELTA | BF16, KIMI, MAMBA | PACKED],
    "optimizers": [{"optimizer": "sgd"}, {"optimizer": "lion"}, BF16 | {"optimizer": "muon"}],
    "sharded": [ZERO, ZERO2 | BF16, ZERO3 | OVERLAP | BF16],
    "recomputed": [rows.FULL_UNIFORM, rows.FULL_BLOCK, {"recompute_granularity": "selective"}],
    "optimizer offloaded": [OFFLOAD, BF16 | OFFLOAD | {"optimizer_offload_fraction": 0.5}, OFFLOAD | {"fp16": True}],
    "muon offloaded": [BF16 | OFFLOAD | {"optimizer": "muon"}, OFFLOAD | {"optimizer": "muon"}],
    "fp8": [
        {"fp8_format": "hybrid", "fp8_recipe": recipe} for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8")
    ],
    "activations offloaded": [
        {"cpu_offloading": True, "cpu_offloading_num_layers": layers, "num_layers": 3} for layers in (1, 2, 3)
    ],
}
"""Each compared with the CPU in one process."""

ON_DISK: list[dict[str, object]] = [{}, BF16, BF16 | OFFLOAD, BF16 | {"optimizer": "muon"}, {"optimizer": "muon"}]
"""With weights on disk."""

TWO_RANKS: dict[str, dict[str, object]] = {
    "tp2 sp, fused loss": TP2 | SP | rows.FUSED_LOSS,
    "pp2 zb_v, packed": PP2 | rows.ZB_V | PACKED | MODERN | SDPA | {"num_layers": 4},
    "pp2 dualpipe_v": PP2 | rows.DUALPIPE_V | {"num_layers": 4},
    "dp2 zero3": ZERO3 | OVERLAP | BF16,
    "cp2 ring, experts over 2 ranks": CP2 | EP2 | MIXTRAL,
    "dp2 ep2 in pairs, recomputed": EP2 | MIXTRAL | PAIRS | BF16 | rows.FULL_UNIFORM,
    "cp2 ring, flash attention": CP2 | BF16 | SDPA | GQA2,
    "cp2 gathered": CP2 | GATHER | {"position_embedding_type": "rope"},
    "cp2, delta net, packed": CP2 | DELTA | PACKED,
    "cp2 heads, latent": CP2 | HEADS | LATENT | SDPA,
    "dp2, delayed fp8, bf16 gradients": DELAYED | ZERO | {"grad_reduce_in_bf16": True},
}
