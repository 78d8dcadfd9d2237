"""Rows of the parity matrix in FP8, in the form of ``rows.ROWS``.

In float64 the products of one process and of a layout differ by 1e-16, so both round to the same 8-bit numbers, and the
bound of all other rows holds here, too. The effect of a different scale is larger by ten orders of magnitude.
"""

from __future__ import annotations

from tests.parity.context_rows import GATHER
from tests.parity.latent_rows import DEEPSEEK_V3, LATENT, LATER
from tests.parity.moe_rows import CP2, DEEPSEEK, DROP, EP2, ETP1, MIXTRAL, PAIRS, ZB_V
from tests.parity.rows import FULL_UNIFORM, MODERN, OVERLAP, PP2, SP, TP2, UNTIED, ZB_H1, ZERO, ZERO3

SMALL = {"num_layers": 2, "global_batch_size": 4}
WIDE = SMALL | {"hidden_size": 256, "ffn_hidden_size": 512}  # at least 128 features on each of two ranks
LONG = WIDE | {"num_layers": 1, "seq_length": 128, "global_batch_size": 2}  # 32 tokens in each of four chunks
SHORT = {"num_layers": 2, "mtp_num_layers": 1}
EXPERTS = MIXTRAL | {"hidden_dropout": 0.0}
MESSAGES = {"moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8"}


def _fp8(recipe: str, fp8_format: str = "hybrid", **more: object) -> dict[str, object]:
    return {"fp8_format": fp8_format, "fp8_recipe": recipe} | more


TENSORWISE, ROWWISE, DELAYED = _fp8("tensorwise"), _fp8("rowwise", "e4m3"), _fp8("delayed")
BLOCKWISE, MXFP8 = _fp8("blockwise", "e4m3"), _fp8("mxfp8", "e4m3")
HISTORY = _fp8("delayed", fp8_amax_history_len=2, fp8_amax_compute_algo="max", fp8_margin=1)
ENDS_IN_BF16 = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}

FP8_ROWS: dict[str, tuple[int, dict, dict]] = {
    "tensorwise, tp2 sp": (2, SMALL | TENSORWISE, TP2 | SP),
    "tensorwise, first layer in bf16, tp2": (2, SMALL | TENSORWISE | ENDS_IN_BF16, TP2),
    "tensorwise, cp2": (2, SMALL | TENSORWISE, CP2),
    "tensorwise, experts, tp2 ep2 etp1": (2, EXPERTS | TENSORWISE, TP2 | SP | EP2 | ETP1),
    "messages, tp2 sp ep2 etp1": (2, EXPERTS | MESSAGES, TP2 | SP | EP2 | ETP1),
    "messages, etp2": (2, EXPERTS | MESSAGES | {"hidden_size": 48}, TP2),
    "tensorwise, dp2 zero3": (2, SMALL | TENSORWISE, ZERO3),
    "delayed, tp2": (2, SMALL | DELAYED, TP2),
    "delayed, dp2 zero1": (2, SMALL | HISTORY, ZERO),
    "delayed, pp2 zb_h1": (2, SMALL | HISTORY, PP2 | ZB_H1),
    "delayed, experts, ep2": (2, EXPERTS | DELAYED, EP2),
    "rowwise, tp2": (2, SMALL | ROWWISE, TP2),
    "rowwise, cp2": (2, SMALL | ROWWISE, CP2 | GATHER),
    "rowwise, experts, etp2": (2, EXPERTS | ROWWISE, TP2),
    "blockwise, tp2": (2, WIDE | BLOCKWISE, TP2),
    "tensorwise, latent attention, tp2 sp": (2, LATENT | TENSORWISE, TP2 | SP),
    "delayed, multi-token prediction, tp2 sp": (2, LATER | SHORT | HISTORY, TP2 | SP),
    "mxfp8, tp2": (2, WIDE | MXFP8, TP2),
    "tensorwise, tp2": (2, SMALL | TENSORWISE, TP2),
    "tensorwise, pp2": (2, SMALL | TENSORWISE, PP2),
    "tensorwise, modern, recompute, dp2 tp2 sp zero3": (
        4,
        MODERN | SMALL | TENSORWISE,
        TP2 | SP | ZERO3 | FULL_UNIFORM | OVERLAP,
    ),
    "tensorwise, experts, ep2": (2, EXPERTS | TENSORWISE, EP2),
    "delayed, tp2 sp": (2, SMALL | HISTORY, TP2 | SP),
    "delayed, cp2": (2, SMALL | HISTORY, CP2),
    "delayed, experts, dp2 pp2 ep2 zb_v": (4, EXPERTS | DELAYED | {"num_layers": 4}, PP2 | EP2 | ZB_V),
    "delayed, experts, etp2": (2, EXPERTS | HISTORY, TP2),
    "rowwise, tp2 sp": (2, SMALL | ROWWISE, TP2 | SP),
    "rowwise, pp2 zb_h1": (2, SMALL | ROWWISE | ENDS_IN_BF16, PP2 | ZB_H1),
    "rowwise, dp2 zero3": (2, SMALL | ROWWISE, ZERO3),
    "rowwise, experts, ep2": (2, EXPERTS | ROWWISE, EP2),
    "rowwise without weight gradients, cp2": (2, SMALL | ROWWISE | {"fp8_wgrad": False}, CP2),
    "blockwise, tp2 sp": (2, WIDE | BLOCKWISE, TP2 | SP),
    "blockwise, pp2": (2, WIDE | BLOCKWISE, PP2),
    "blockwise, dp2 zero1": (2, WIDE | BLOCKWISE, ZERO),
    "blockwise, experts, ep2": (2, EXPERTS | BLOCKWISE, EP2),
    "mxfp8, tp2 sp": (2, WIDE | MXFP8, TP2 | SP),
    "mxfp8, cp2": (2, LONG | MXFP8, CP2),
    "rowwise, latent attention, dp2 zero3": (2, LATENT | ROWWISE, ZERO3),
    "delayed, latent attention, cp2": (2, LATENT | HISTORY, CP2),
    "rowwise, deepseek, tp2 sp ep2 etp1": (2, DEEPSEEK_V3 | ROWWISE, TP2 | SP | EP2 | ETP1),
    "tensorwise, multi-token prediction, pp2": (2, LATER | TENSORWISE, PP2),
    "rowwise, multi-token prediction, untied, dp2 zero3": (2, LATER | SHORT | UNTIED | ROWWISE, ZERO3),
    "mxfp8, dp2 zero3": (2, WIDE | MXFP8, ZERO3),
    "messages, cp2 ep2": (2, EXPERTS | MESSAGES, CP2 | EP2),
    "messages, latents, capacity, ep2 zero2, in pairs": (
        2,
        DEEPSEEK | DROP | MESSAGES | {"moe_latent_size": 40},
        EP2 | PAIRS | {"zero_stage": 2, "moe_shared_expert_overlap": True},
    ),
    "messages, mxfp8, dp2 pp2 ep2 zb_v": (4, EXPERTS | MESSAGES | MXFP8 | {"num_layers": 4}, PP2 | EP2 | ZB_V),
}
