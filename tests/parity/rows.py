"""The rows of the parity matrix: a model, and a layout that must compute what one process computes."""

from __future__ import annotations

from functools import cache

from megatron_core.config import RunConfig
from megatron_core.verify import Trace, trace_training
from megatron_core.verify.bounds import Errors, rounding_noise
from megatron_core.verify.gpt import train_traced
from tests.parity.heterogeneous_rows import HETEROGENEOUS_ROWS
from tests.parity.hub_rows import HUB_ROWS
from tests.parity.latent_rows import LATENT_ROWS
from tests.parity.moe_rows import MOE_ROWS
from tests.parity.recurrent_rows import RECURRENT_ROWS
from tests.parity.sink_rows import SINK_ROWS
from tests.parity.sparse_rows import SPARSE_ROWS

BASE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method_std": 0.1,  # large enough that every part of the model affects the loss
    "make_vocab_size_divisible_by": 8,
    "seq_length": 16,
    "vocab_size": 101,  # not divisible by any layout: every row has padding in its vocabulary
    "mock_data": True,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 10,
    "lr": 1e-2,
    "clip_grad": 0.5,  # below the norms that occur here, so that every row clips
    "fp64": True,
}
TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
PP3 = {"pipeline_model_parallel_size": 3}
COUNTS = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
SP, V2 = {"sequence_parallel": True}, {"num_virtual_stages_per_pipeline_rank": 2}
ZERO, OVERLAP = (
    {"use_distributed_optimizer": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
)
ZERO2, ZERO3 = {"zero_stage": 2}, {"zero_stage": 3}
HYBRID = {"num_distributed_optimizer_instances": 2}
SMALL_BUCKETS = {"ddp_bucket_size": 3000}
MUP = {"use_mup": True, "mup_base_hidden_size": 8, "mup_base_head_dim": 4.0, "mup_embedding_mult": 3.0}
UNTIED = {"untie_embeddings_and_output_weights": True}
GLOO = {"distributed_backend": "gloo"}  # other rows use shared memory
FUSED_LOSS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
SDPA = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODERN = {
    "position_embedding_type": "rope",
    "rotary_percent": 0.5,
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 64,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    **UNTIED,
}
LLAMA4 = MODERN | {"qk_layernorm": False, "qk_l2_norm": True, "no_rope_freq": (0, 1, 1, 0)}
# Rotary positions: without them a bias on all keys does not change attention weights, and its true gradient is 0.
GQA1 = {
    "group_query_attention": True,
    "num_query_groups": 1,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
}
GQA2 = {"group_query_attention": True, "num_query_groups": 2}
GATED = {"attention_output_gate": True, "apply_wd_to_qk_layernorm": True}
FULL_UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
FULL_BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
WINDOW = {"window_size": (2, 0), "window_attn_skip_freq": (1, 0, 0, 1)}
GPIPE, ZB_H1, ZB_H2, ZB_V, DUALPIPE_V = (
    {"pipeline_schedule": name} for name in ("gpipe", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
)
# The last id of the vocabulary ends a document: `RaggedDataset` has about three of them per sequence.
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}
IN_CHUNKS = {"tp_comm_overlap_chunks": 3}  # of 16 tokens
SYNCHRONOUS = {"overlap_p2p_communication": False}
LAYERS8 = {"num_layers": 8}
GROWING = {"rampup_batch_size": (2, 2, 6), "seq_length_warmup": (8, 4, 6)}  # 2 x 8, 4 x 8, 8 x 16


def layout_of(text: str) -> dict[str, str]:
    """Explicit layout of the stages."""
    return {"pipeline_model_parallel_layout": text}


# name: (world size, settings of both sides, additional settings of the layout)
ROWS: dict[str, tuple[int, dict, dict]] = {
    "micro-batches of 2": (1, {}, {"micro_batch_size": 2}),  # C2
    "one micro-batch": (1, {}, {"micro_batch_size": 8}),  # C2
    "tp2": (2, {}, TP2),
    "tp4": (4, {}, TP4),
    "tp2 sp": (2, {}, TP2 | SP),
    "tp4 sp": (4, {}, TP4 | SP),
    "tp2 sp over gloo": (2, {}, TP2 | SP | GLOO),
    "tp2 sp without overlap": (2, {}, TP2 | SP | {"tp_comm_overlap": False}),
    "tp2 in chunks": (2, {}, TP2 | IN_CHUNKS),
    "tp2 sp in parts": (2, {}, TP2 | SP | IN_CHUNKS),
    "tp4 sp in parts": (4, {}, TP4 | SP | IN_CHUNKS),
    "tp2 pp2 zb_h1 sp in parts": (4, {}, TP2 | PP2 | ZB_H1 | SP | IN_CHUNKS),
    "pp2": (2, {}, PP2),
    "pp4": (4, {}, PP4),
    "pp2 x 2 chunks": (2, {}, PP2 | V2),
    "pp2 x 2 chunks, 3 micro-batches": (2, {"global_batch_size": 3}, PP2 | V2),  # C32
    "pp4, 1 micro-batch": (4, {"global_batch_size": 1}, PP4),  # C32
    "pp4, 3 micro-batches": (4, {"global_batch_size": 3}, PP4),  # C32
    "pp4, 8 micro-batches": (4, {}, PP4),
    "pp2, micro-batches of 4": (2, {}, PP2 | {"micro_batch_size": 4}),  # C2
    "dp2": (2, {}, {}),
    "dp2, overlap": (2, {}, {"overlap_grad_reduce": True} | SMALL_BUCKETS),  # C12
    "dp4": (4, {}, {}),
    "dp4, a rank without a token": (4, {"global_batch_size": 4}, {}),  # C3
    "dp1 zero1": (1, {}, ZERO | {"micro_batch_size": 2}),  # C35
    "dp2 zero1": (2, {}, ZERO),
    "dp2 zero1, overlap": (2, {}, ZERO | OVERLAP | SMALL_BUCKETS),  # C59, C60
    # ZeRO 2 and 3; the embedding is tied and there are several micro-batches unless the name says otherwise.
    "dp2 zero2": (2, {}, ZERO2),  # C35
    "dp2 zero2, overlap": (2, {}, ZERO2 | OVERLAP | SMALL_BUCKETS),  # C12, C60
    "dp2 zero3, one micro-batch": (2, {}, ZERO3 | {"micro_batch_size": 4}),
    "dp2 zero3, overlap": (2, {}, ZERO3 | OVERLAP | SMALL_BUCKETS),  # C59, C60
    "dp2 zero3, weights kept": (2, {}, ZERO3 | {"zero3_keep_after_forward": True}),
    "dp2 zero3, small weights whole": (2, {}, ZERO3 | OVERLAP | {"zero3_param_persistence_threshold": 300}),
    "dp1 zero3": (1, {}, ZERO3 | {"micro_batch_size": 2}),  # C35
    "untied, fused loss, dp2 zero3, overlap": (2, UNTIED | FUSED_LOSS, ZERO3 | OVERLAP),
    "full recompute, dp2 zero3, overlap": (2, {}, ZERO3 | OVERLAP | FULL_UNIFORM),
    "dp2 tp2 sp zero3, overlap": (4, {}, TP2 | SP | ZERO3 | OVERLAP),  # C17
    "1 group, dp2 tp2 zero3": (4, GQA1, TP2 | ZERO3),  # C19
    "dp2 pp2 zero2, tied": (4, {}, PP2 | ZERO2),  # C10
    "dp2 pp2 zero3 x 2 chunks": (4, {}, PP2 | V2 | ZERO3 | OVERLAP),  # C10
    "dp2 pp2 zb_h1 zero2, overlap": (4, {}, PP2 | ZB_H1 | ZERO2 | OVERLAP),
    "dp2 pp2 zb_v zero3, overlap": (4, {}, PP2 | ZB_V | ZERO3 | OVERLAP),
    "full recompute, dp2 pp2 dualpipe_v zero3": (4, {}, PP2 | DUALPIPE_V | ZERO3 | FULL_BLOCK),
    "dp2 tp2 pp2 sp zero3": (8, {}, TP2 | PP2 | SP | ZERO3),
    "dp2 pp3 zero3, a rank without parameters": (6, {}, PP3 | ZERO3 | OVERLAP | layout_of("Ett||ttL")),  # C34
    "muon, dp2 tp2 zero1": (4, {"optimizer": "muon"}, TP2 | ZERO | OVERLAP | SMALL_BUCKETS),
    "muon, mup, matrices cut, dp2 pp2 zero1": (
        4,
        {"optimizer": "muon"} | MUP,
        PP2 | ZERO | SMALL_BUCKETS | {"use_layer_wise_param_layout": False},
    ),
    "mup, untied, fused loss, dp2 tp2 zero2": (4, UNTIED | FUSED_LOSS | MUP, TP2 | ZERO2),
    "muon, 1 group, dp2 tp2 zero3": (4, GQA1 | {"optimizer": "muon"}, TP2 | ZERO3),
    "muon, whole QKV, Nesterov, 2 groups, tp4": (
        4,
        GQA2 | {"optimizer": "muon", "muon_split_qkv": False, "muon_nesterov": True},
        TP4,
    ),
    "muon by heads, gate and up apart, 2 groups, dp2 tp2 zero2": (
        4,
        GQA2 | {"optimizer": "muon", "muon_split_heads": True, "muon_split_gate_up": True, "swiglu": True},
        TP2 | ZERO2,
    ),
    "lion, modern, dp2 tp2 sp zero2": (4, MODERN | {"optimizer": "lion"}, TP2 | SP | ZERO2),
    "lamb, 2 groups, dp2 tp2 sp zero2": (4, GQA2 | {"optimizer": "lamb"}, TP2 | SP | ZERO2),
    "lamb, tied, dp2 pp2 zero1": (4, {"optimizer": "lamb"}, PP2 | ZERO | SMALL_BUCKETS),
    "sgd, own rate of embeddings, clipped by value, dp2 pp2 zero3": (
        4,
        {"optimizer": "sgd", "decoupled_lr": 2e-2, "clip_grad_value": 1e-2, "lr_warmup_iters": 2},
        PP2 | ZERO3,
    ),
    "dp4 zero1 in 2 instances": (4, {}, ZERO | HYBRID | OVERLAP),  # C62
    "dp4 zero2 in 2 instances": (4, {}, ZERO2 | HYBRID),
    "dp4 zero3 in 2 instances": (4, {}, ZERO3 | HYBRID | OVERLAP),  # C62
    "tp2 pp2": (4, {}, TP2 | PP2),
    "tp2 pp2 sp x 2 chunks": (4, {}, TP2 | PP2 | SP | V2),
    "dp2 tp2 sp, overlap": (4, {}, TP2 | SP | {"overlap_grad_reduce": True} | SMALL_BUCKETS),  # C56
    "dp2 pp2 zero1, tied": (4, {}, PP2 | ZERO),  # C10, C39
    "dp2 pp2 zero1 x 2 chunks over gloo": (4, {}, PP2 | ZERO | V2 | OVERLAP | GLOO),  # C10
    "dp2 tp2 pp2": (8, {}, TP2 | PP2),
    "dp2 tp2 pp2 sp zero1 x 2 chunks": (8, {}, TP2 | PP2 | SP | ZERO | V2 | OVERLAP),  # C39, C56
    "rank order pp-dp-tp": (8, {}, TP2 | PP2 | {"rank_order": "pp-dp-tp-cp-ep"}),  # C50
    "1 group, tp4": (4, GQA1, TP4),  # C19, C18
    "2 groups, tp4": (4, GQA2, TP4),  # C19
    "2 groups, tp4 sp": (4, GQA2, TP4 | SP),
    "2 groups, tp2": (2, GQA2, TP2),
    "1 group, dp2 tp2 zero1": (4, GQA1, TP2 | ZERO),
    "5 layers, pp2": (2, {"num_layers": 5}, PP2),  # C34
    "pp2, Ettt|tL": (2, {}, PP2 | layout_of("Ettt|tL")),  # C34
    "pp2 x 2 chunks, E|tt|tt|L": (2, {}, PP2 | layout_of("E|tt|tt|L")),  # C34
    "pp2 x 2 chunks, untied, Et|tt||tL": (2, UNTIED, PP2 | layout_of("Et|tt||tL")),  # C34
    "pp4, a rank without parameters": (4, {}, PP4 | layout_of("Et*3||t|L")),  # C34
    "dp2 pp3 zero1, a rank without parameters": (6, {}, PP3 | ZERO | OVERLAP | layout_of("Ett||ttL")),  # C34
    "pp4, first and last counts": (4, {"num_layers": 6}, PP4 | COUNTS),  # C34
    "pp2, loss as a layer": (2, {"num_layers": 3}, PP2 | {"account_for_loss_in_pipeline_split": True}),  # C34
    "full recompute, pp2, E|tt|tt|L": (2, {}, PP2 | FULL_UNIFORM | layout_of("E|tt|tt|L")),
    "untied, pp2": (2, UNTIED, PP2),
    "untied, tp2 pp2 sp": (4, UNTIED, TP2 | PP2 | SP),
    "fused output layer and loss, tp2 sp": (2, {}, TP2 | SP | FUSED_LOSS),
    "fused attention, tp2 sp": (2, SDPA, TP2 | SP),
    "fused attention, 2 groups, tp4": (4, SDPA | GQA2, TP4),
    "modern, tp2 sp": (2, MODERN, TP2 | SP),
    "norms without weights, layers without positions, tp2 sp": (2, LLAMA4 | GQA2, TP2 | SP),
    "norms without weights, layers without positions, pp2 x 2 chunks": (2, LLAMA4, PP2 | V2),
    "modern, tp2 pp2": (4, MODERN, TP2 | PP2),
    "modern, 2 groups, tp4 sp": (4, MODERN | GQA2, TP4 | SP),
    "gated attention, decay of query and key norms, tp2 sp": (2, MODERN | GQA2 | GATED, TP2 | SP),
    "gated attention, dp2 pp2 zb_h1 zero1": (4, MODERN | GATED, PP2 | ZB_H1 | ZERO | OVERLAP),
    "muon, gated attention, decay of query and key norms, dp2 tp2 zero3": (
        4,
        MODERN | GQA2 | GATED | {"optimizer": "muon"},
        TP2 | ZERO3,
    ),
    "geglu, tp2": (2, {"geglu": True, "ffn_hidden_size": 64}, TP2),
    "squared relu, tp2": (2, {"squared_relu": True}, TP2),
    "full recompute, uniform, tp2 sp": (2, {}, TP2 | SP | FULL_UNIFORM),  # C27
    "full recompute, block, pp2": (2, {}, PP2 | FULL_BLOCK),
    "growing, micro-batches of 2": (1, GROWING, {"micro_batch_size": 2}),
    "growing, tp2 pp2 sp x 2 chunks": (4, GROWING, TP2 | PP2 | SP | V2),
    "growing by steps, dp2 pp2": (4, {"step_batch_size_schedule": ("0:2", "64:4", "160:8")}, PP2),
    "growing, dp2 pp2 zb_h1 zero1": (4, GROWING, PP2 | ZB_H1 | ZERO | OVERLAP),
    # schedules; 1f1b is "pp2" and "pp4", interleaved "pp2 x 2 chunks"
    "pp2 gpipe": (2, {}, PP2 | GPIPE),
    "pp2 zb_h1": (2, {}, PP2 | ZB_H1),
    "pp2 zb_h2": (2, {}, PP2 | ZB_H2),
    "pp2 zb_v": (2, {}, PP2 | ZB_V),
    "pp2 dualpipe_v": (2, {}, PP2 | DUALPIPE_V),
    "pp4 gpipe": (4, {}, PP4 | GPIPE),
    "pp4 interleaved": (4, LAYERS8, PP4 | V2),
    "pp4 zb_h1": (4, {}, PP4 | ZB_H1),
    "pp4 zb_h2": (4, {}, PP4 | ZB_H2),
    "pp4 zb_v": (4, LAYERS8, PP4 | ZB_V),
    "pp4 dualpipe_v": (4, LAYERS8, PP4 | DUALPIPE_V),
    "pp4 zb_v, 3 micro-batches": (4, LAYERS8 | {"global_batch_size": 3}, PP4 | ZB_V),  # C32
    "pp2 zb_h1 without overlap": (2, {}, PP2 | ZB_H1 | SYNCHRONOUS),
    "pp4 dualpipe_v without overlap": (4, LAYERS8, PP4 | DUALPIPE_V | SYNCHRONOUS),
    "5 layers, pp2 zb_v": (2, {"num_layers": 5}, PP2 | ZB_V),  # C34
    "5 layers, pp4 zb_h2": (4, {"num_layers": 5}, PP4 | ZB_H2),  # C34
    "full recompute, pp2 zb_v": (2, {}, PP2 | ZB_V | FULL_BLOCK),
    "full recompute, tp2 pp2 sp zb_h1": (4, {}, TP2 | PP2 | SP | ZB_H1 | FULL_UNIFORM),
    "tp2 pp2 sp zb_v": (4, {}, TP2 | PP2 | SP | ZB_V),
    "tp2 pp2 dualpipe_v": (4, {}, TP2 | PP2 | DUALPIPE_V),
    "dp2 pp2 zb_h1 zero1, overlap": (4, {}, PP2 | ZB_H1 | ZERO | OVERLAP | SMALL_BUCKETS),  # C10
    "dp2 pp2 dualpipe_v zero1, overlap": (4, {}, PP2 | DUALPIPE_V | ZERO | OVERLAP | SMALL_BUCKETS),
    "untied, pp2 zb_v": (2, UNTIED, PP2 | ZB_V),
    "modern, tp2 pp2 sp zb_h2": (4, MODERN, TP2 | PP2 | SP | ZB_H2),
    "selective recompute, tp2": (2, {}, TP2 | {"recompute_granularity": "selective"}),
    # Several documents in a sequence; with dropout through a block mask, without it by separate attention per document.
    "packed, tp2 sp": (2, PACKED, TP2 | SP),  # C45
    "packed, pp2 x 2 chunks": (2, PACKED, PP2 | V2),  # C45
    "packed, dp2": (2, PACKED, {}),  # C45
    "packed, selective recompute, tp2": (2, PACKED, TP2 | {"recompute_granularity": "selective"}),  # C45
    "packed, modern, 2 groups, tp2 sp": (2, PACKED | MODERN | GQA2 | SDPA, TP2 | SP),  # C45
    "packed, modern, pp2 zb_v": (2, PACKED | MODERN | SDPA, PP2 | ZB_V),  # C45
    "packed, modern, dp2, micro-batches of 4": (2, PACKED | MODERN | SDPA, {"micro_batch_size": 4}),  # C45
    "positions restart, modern, dp2, micro-batches of 4": (
        2,
        PACKED | MODERN | SDPA | {"reset_attention_mask": False},
        {"micro_batch_size": 4},
    ),
    "packed, modern, window in two of four layers, pp2 x 2 chunks": (
        2,
        PACKED | MODERN | SDPA | WINDOW,
        PP2 | V2,
    ),  # C54
    "packed, modern, full recompute, pp2": (2, PACKED | MODERN | SDPA, PP2 | FULL_BLOCK),  # C45
    **MOE_ROWS,
    **LATENT_ROWS,
    **SINK_ROWS,
    **RECURRENT_ROWS,
    **SPARSE_ROWS,
    **HUB_ROWS,
    **HETEROGENEOUS_ROWS,
}


def baseline_of(shared: dict) -> Trace:
    """The trace of one process."""
    return _baseline(tuple(sorted(shared.items())))


@cache
def _baseline(settings: tuple[tuple[str, object], ...]) -> Trace:
    return trace_training(RunConfig.from_flat(dict(settings)), world_size=1)


def noise_of(shared: dict, dtype_settings: dict) -> Errors:
    """Rounding errors of each quantity in one process, relative to the baseline of ``shared`` in float64."""
    config = RunConfig.from_flat(shared | {"fp64": False} | dtype_settings)
    return rounding_noise(train_traced, config, 3, baseline=baseline_of(shared))[1]


def compare(world_size: int, model: dict, layout: dict, extra: dict | None = None) -> tuple[Trace, Trace]:
    """The traces of a row and of one process."""
    shared = BASE | model | (extra or {})
    baseline = baseline_of(shared)
    return trace_training(RunConfig.from_flat(shared | layout), world_size), baseline
