"""Rows of the parity matrix with QK-clip, z-loss, SOAP and AdaMuon, in the form of ``rows.ROWS``."""

from __future__ import annotations

from tests.parity.context_rows import CP2
from tests.parity.latent_rows import LATENT
from tests.parity.moe_rows import EP2
from tests.parity.rows import GQA1, GQA2, OVERLAP, PACKED, PP2, SP, TP2, UNTIED, ZERO, ZERO3

# Below the logits that occur here, so that every step clips heads.
CLIP = {"qk_clip": True, "qk_clip_threshold": 0.5, "qk_clip_alpha": 0.3, "lr": 3e-2, "num_layers": 2}
CLIP |= {"global_batch_size": 4}
ONE_GROUP = GQA1 | {"qk_layernorm": False}
Z_LOSS = {"output_z_loss_coeff": 0.03, "num_layers": 2, "global_batch_size": 4}
MUON = {"optimizer": "muon"}
SOAP = {"optimizer": "soap", "num_layers": 2, "global_batch_size": 4}
# A smaller epsilon magnifies the rounding of elements whose true value is 0.
ADAMUON = {"optimizer": "adaptive_muon", "num_layers": 2, "global_batch_size": 4, "adaptive_muon_eps": 1e-5}
NORMUON = ADAMUON | {"adaptive_muon_moment2_method": "normuon", "adaptive_muon_beta2": 0.8}
EXPERTS = SOAP | {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True, "swiglu": True}

STABILITY_ROWS: dict[str, tuple[int, dict, dict]] = {
    "qk-clip, 1 group, tp2 sp": (2, CLIP | ONE_GROUP, TP2 | SP),
    "qk-clip, packed, 2 groups, cp2": (2, CLIP | PACKED | GQA2, CP2),
    "qk-clip, pp2": (2, CLIP, PP2),
    "z-loss, tp2 sp": (2, Z_LOSS, TP2 | SP),
    "z-loss, untied, soft cap, pp2": (2, Z_LOSS | UNTIED | {"final_logit_softcapping": 2.0}, PP2),
    "z-loss, packed, cp2": (2, Z_LOSS | PACKED, CP2),
    "z-loss, dp2 zero3": (2, Z_LOSS, ZERO3),
    "qk-clip, window, cp2": (2, CLIP | {"window_size": (2, 0)}, CP2),
    "muonclip, dp2 zero1, overlap": (2, CLIP | MUON, ZERO | OVERLAP),
    "muonclip, dp2 zero3": (2, CLIP | MUON, ZERO3),
    "soap, tp2": (2, SOAP, TP2),
    "soap, 2 groups, tp2 sp": (2, SOAP | GQA2 | {"soap_split_qkv": False}, TP2 | SP),
    # Norms of heads leave a null direction of each head's queries and keys.
    "soap, norms of heads, tp2": (2, SOAP | {"qk_layernorm": True, "position_embedding_type": "rope"}, TP2),
    "soap, pp2": (2, SOAP | {"soap_precondition_frequency": 2}, PP2),
    "soap, dp2 zero1, overlap": (2, SOAP | {"soap_max_precondition_dim": 40}, ZERO | OVERLAP),
    "soap, dp2 zero3": (2, SOAP, ZERO3),
    "soap, experts, gate and up apart, ep2": (2, EXPERTS | {"soap_split_gate_up": True}, EP2),
    "soap, experts, gate and up apart, dp2 tp2 ep2 zero1": (
        4,
        EXPERTS | {"soap_split_gate_up": True},
        TP2 | EP2 | ZERO,
    ),
    "adamuon, tp2": (2, ADAMUON, TP2),
    "adamuon, 2 groups, Nesterov, pp2": (2, ADAMUON | GQA2 | {"muon_nesterov": True}, PP2),
    "adamuon, matrices cut, dp2 zero1": (2, ADAMUON, ZERO | {"use_layer_wise_param_layout": False}),
    "normuon, 2 groups, tp2 sp": (2, NORMUON | GQA2, TP2 | SP),
    "normuon, pp2": (2, NORMUON, PP2),
    "normuon, dp2 zero1, overlap": (2, NORMUON, ZERO | OVERLAP),
    "normuon, dp2 zero3": (2, NORMUON, ZERO3),
    "normuon, experts, dp2 tp2 ep2 zero1": (4, EXPERTS | NORMUON, TP2 | EP2 | ZERO),
    "muonclip of latents, tp2 sp": (2, CLIP | MUON | LATENT | {"num_layers": 2, "global_batch_size": 4}, TP2 | SP),
}
