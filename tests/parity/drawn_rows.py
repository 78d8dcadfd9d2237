"""Rows of the parity matrix drawn at random from all settings of a model, a training and a layout.

``python -m tests.parity.drawn_rows --first 0 --count 300`` compares this number of rows and prints those that fail. A
row is a function of its number: settings are tried one after another and kept if ``problems`` accepts them, so that
each row is valid and many combine settings that no handwritten test does.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError
from megatron_core.verify import RankFailure, Trace, trace_training
from megatron_core.verify.bounds import FLOAT64_BOUND

Settings = dict[str, Any]
Choices = list[Settings]

STEPS = 2
NOISE = 1e-12
"""Relative to the largest gradient or weight: smaller differences are rounding errors, even of small tensors."""


def either(name: str, *values: object) -> Choices:
    """One setting with several values."""
    return [{name: value} for value in values]


def on(name: str) -> Choices:
    """A switch."""
    return [{name: True}]


PACKED: Settings = {"reset_position_ids": True, "reset_attention_mask": True}
NTK: Settings = {"use_rope_scaling": True, "rope_scaling_type": "ntk", "rope_scaling_factor": 4.0}
QK_NORMS: Choices = [
    {},
    {"qk_layernorm_over_heads": True},
    {"qk_layernorm_weight_per_head": True},
    {"qk_layernorm_after_rotary": True},
]
EXPERTS: Settings = {"num_experts": 4, "moe_ffn_hidden_size": 24, "disable_bias_linear": True}
LATENT: Settings = {
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
}
MUP: Settings = {"use_mup": True, "mup_base_hidden_size": 8, "mup_base_head_dim": 4.0, "mup_embedding_mult": 3.0}
WSD: Settings = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2}
DECAY: Settings = {"start_weight_decay": 0.01, "end_weight_decay": 0.1}
SCALED: Settings = {"use_rope_scaling": True, "original_max_position_embeddings": 8}
GROUPS: Settings = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
BIASED: Settings = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.05}
CAPACITY: Settings = {"moe_expert_capacity_factor": 0.75}

# Settings of both sides. Each is drawn with its probability; earlier ones restrict later ones.
MODEL: list[tuple[float, Choices]] = [
    (1.0, either("num_layers", 1, 2, 3, 4, 4, 5)),
    (0.6, either("position_embedding_type", "rope", "rope", "none")),
    (0.3, [EXPERTS]),
    (0.15, [LATENT, LATENT | {"q_lora_rank": 12}]),
    (0.3, [{"mtp_num_layers": 1}, {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}]),
    (0.4, on("untie_embeddings_and_output_weights")),
    (0.4, [{"group_query_attention": True, "num_query_groups": groups} for groups in (1, 2)]),
    (0.3, either("kv_channels", 6, 10, 16)),
    (0.5, either("ffn_hidden_size", 40, 48, 64)),
    (0.5, [*on("swiglu"), *on("geglu"), *on("squared_relu"), *on("relu"), *on("xielu"), *on("openai_gelu")]),
    (0.5, on("disable_bias_linear")),
    (0.2, on("add_qkv_bias")),
    (0.2, on("add_attention_output_bias")),
    (0.2, on("add_output_layer_bias")),
    (0.4, either("normalization", "RMSNorm")),
    (0.2, on("apply_layernorm_1p")),
    (0.2, on("disable_bias_layernorm")),
    (0.3, either("norm_placement", "sandwich", "post")),
    (0.4, [{"qk_layernorm": True} | kind for kind in QK_NORMS]),
    (0.2, on("apply_wd_to_qk_layernorm")),
    (0.2, on("attention_output_gate")),
    (0.3, [{"parallel_residual": True}, {"parallel_residual": True, "parallel_residual_shared_norm": True}]),
    (0.2, on("scale_embeddings")),
    (0.2, either("softmax_scale", 0.3)),
    (0.2, either("attn_logit_softcapping", 2.0)),
    (0.2, either("final_logit_softcapping", 3.0)),
    (0.3, either("rotary_percent", 0.5)),
    (0.2, on("rotary_interleaved")),
    (0.2, either("rotary_seq_len_interpolation_factor", 2.0)),
    (0.3, [NTK, *(SCALED | {"rope_scaling_type": kind} for kind in ("llama3", "yarn", "dynamic"))]),
    (0.3, [{"window_size": (4, 0)}, {"window_size": (3, 0), "window_attn_skip_freq": (2,)}]),
    (0.1, either("rotary_base_of_windows", 100.0)),
    (0.1, [MUP]),
    (0.5, either("attention_dropout", 0.0)),
    (0.5, either("hidden_dropout", 0.0)),
    (0.3, [PACKED, {"reset_position_ids": True}, {"reset_attention_mask": True}]),
    (0.2, on("eod_mask_loss")),
    (0.3, either("moe_layer_freq", (2,))),
    (0.3, either("moe_router_topk", 1, 3)),
    (0.3, either("moe_router_score_function", "sigmoid", "sqrtsoftplus", "sparsemixer")),
    (0.2, on("moe_router_pre_softmax")),
    (0.3, [GROUPS]),
    (0.2, either("moe_router_topk_scaling_factor", 2.5)),
    (0.3, either("moe_router_load_balancing_type", "seq_sinkhorn", "none")),
    (0.6, either("moe_aux_loss_coeff", 0.1)),
    (0.3, either("moe_z_loss_coeff", 0.01)),
    (0.3, [BIASED]),
    (0.2, either("moe_input_jitter_eps", 0.1)),
    (0.3, [CAPACITY, CAPACITY | {"moe_token_drop_policy": "position"}]),
    (0.3, on("moe_pad_expert_input_to_capacity")),
    (0.4, either("moe_shared_expert_intermediate_size", 16)),
    (0.5, on("moe_shared_expert_gate")),
    (0.1, either("moe_router_dtype", "fp64")),
    (0.3, either("global_batch_size", 4, 12)),
    (0.2, [{"rampup_batch_size": (2, 2, 4)}, {"step_batch_size_schedule": ("0:2", "32:4")}]),
    (0.2, either("seq_length_warmup", (8, 4, 4), (12, 4, 2))),
    (0.3, either("seq_length", 12, 24, 32)),
    (0.3, either("optimizer", "sgd", "muon")),
    (0.2, either("decoupled_lr", 2e-2)),
    (0.2, either("clip_grad", 0.0, 100.0)),
    (0.2, either("clip_grad_value", 1e-2)),
    (0.2, either("lr_warmup_iters", 1, 3)),
    (0.4, [*either("lr_decay_style", "constant", "cosine", "inverse-square-root"), WSD]),
    (0.2, [DECAY | {"weight_decay_incr_style": kind} for kind in ("linear", "cosine")]),
]

RECOMPUTE: Choices = [
    *({"recompute_granularity": "selective", "recompute_modules": (part,)} for part in ("core_attn", "layernorm")),
    *({"recompute_granularity": "selective", "recompute_modules": (part,)} for part in ("mlp", "moe", "mla_up_proj")),
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe_act", "shared_experts")},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
]
STAGES: Choices = [
    *either("num_virtual_stages_per_pipeline_rank", 2, 2, 2),
    *either("num_layers_per_virtual_pipeline_stage", 1),
    *either("decoder_first_pipeline_num_layers", 1, 2),
    *either("decoder_last_pipeline_num_layers", 1, 2),
    *on("account_for_embedding_in_pipeline_split"),
    *on("account_for_loss_in_pipeline_split"),
    {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    *either("pipeline_model_parallel_layout", "E|tL", "Et|tL", "E|t|t|L", "Ettt|tL", "Et|tt||L", "Et||t|tL"),
]
HIERARCHY: Settings = {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)}
OFFLOAD: Settings = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}

# Settings of the layout only.
LAYOUT: list[tuple[float, Choices]] = [
    (0.6, either("pipeline_model_parallel_size", 2, 2, 4)),
    (0.4, either("tensor_model_parallel_size", 2, 4)),
    (0.5, either("context_parallel_size", 2, 4)),
    (0.5, STAGES),
    (0.4, either("pipeline_schedule", "gpipe", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "1f1b", "interleaved")),
    (0.2, [{"overlap_p2p_communication": False}]),
    (0.6, on("sequence_parallel")),
    (0.2, [{"tp_comm_overlap": False}]),
    (0.2, either("tp_comm_overlap_chunks", 2, 3)),
    (0.6, [*either("cp_comm_type", ("all_gather",), ("a2a",), ("a2a", "p2p")), HIERARCHY]),
    (0.6, either("zero_stage", 1, 2, 3)),
    (0.5, on("overlap_grad_reduce")),
    (0.5, on("overlap_param_gather")),
    (0.3, on("zero3_keep_after_forward")),
    (0.3, either("num_distributed_optimizer_instances", 2)),
    (0.6, either("ddp_bucket_size", 500, 3000)),
    (0.3, either("rank_order", "pp-dp-tp-cp-ep", "tp-pp-dp-cp-ep", "dp-ep-cp-tp-pp")),
    (0.1, either("distributed_backend", "gloo")),
    (0.6, either("expert_model_parallel_size", 2, 4)),
    (0.4, either("expert_tensor_parallel_size", 1, 2)),
    (0.3, either("moe_token_dispatcher_type", "allgather")),
    (0.3, on("moe_shared_expert_overlap")),
    (0.5, either("micro_batch_size", 2, 3, 4)),
    (0.4, RECOMPUTE),
    (0.2, [OFFLOAD]),
    (0.2, [{"optimizer_cpu_offload": True}, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}]),
    (0.2, either("optimizer_offload_dir", "{folder}/state")),
    (0.6, either("zero3_param_offload_dir", "{folder}/weights")),
    (0.3, [{"use_layer_wise_param_layout": False}]),
    (0.3, [{"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": kind} for kind in ("native", "linear")]),
    (0.2, either("kernel_backend", "reference")),
    (0.2, either("attention_backend", "unfused")),
    (0.1, on("apply_query_key_layer_scaling")),
    (0.1, on("poison_buffers")),
    (0.1, on("log_norms_by_layer")),
]
BASE: Settings = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "init_method_std": 0.1,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 16,
    "vocab_size": 101,
    "tokenizer_type": "NullTokenizer",
    "mock_data": True,
    "global_batch_size": 8,
    "train_iters": 10,
    "lr": 1e-2,
    "adam_eps": 1e-3,  # a smaller one magnifies the rounding of gradients that are almost zero
    "clip_grad": 0.5,
    "fp64": True,
    "record_times": False,
}


def is_legal(settings: Settings, world_size: int) -> bool:
    """Whether a run with this number of ranks may have these settings."""
    try:
        return next(problems(RunConfig.from_flat(settings), world_size), None) is None
    except ConfigError:
        return False


def grown(rng: random.Random, settings: Settings, choices: list[tuple[float, Choices]], world_size: int) -> Settings:
    """``settings`` with valid random values of ``choices``."""
    for probability, options in choices:
        if rng.random() < probability:
            more = settings | rng.choice(options)
            settings = more if is_legal(more, world_size) else settings
    return settings


def row(number: int, folder: str = "/nowhere") -> tuple[int, Settings, Settings]:
    """World size, settings of one process, and settings of the layout; files of a run are written below ``folder``."""
    rng = random.Random(number)
    shared = grown(rng, BASE, MODEL, 1)
    size = rng.choice((2, 2, 4, 4, 4, 1))
    if not is_legal(shared, size):  # the batch is not divisible by the number of replicas
        size = 1
    ours = grown(rng, shared, LAYOUT, size)
    return size, shared, {k: v.format(folder=folder) if isinstance(v, str) else v for k, v in ours.items()}


def faults(found: Trace, baseline: Trace) -> Iterator[str]:
    """Differences larger than rounding errors."""
    yield from found.faults
    if not np.isfinite(baseline.losses).all():
        yield f"in one process the losses are {baseline.losses}"
    for kind in ("losses", "norms"):
        ours, theirs = getattr(found, kind), getattr(baseline, kind)
        if not np.allclose(ours, theirs, rtol=FLOAT64_BOUND, atol=0):
            yield f"{kind} are {ours} instead of {theirs}"
    largest: dict[str, float] = {}
    for name, values in baseline.tensors.items():
        kind = name.partition(".")[0]
        largest[kind] = max(largest.get(kind, 0.0), float(np.abs(values).max(initial=0.0)))
    for name in sorted(baseline.tensors.keys() | found.tensors.keys()):
        expected, actual = baseline.tensors.get(name), found.tensors.get(name)
        if expected is None or actual is None or expected.shape != actual.shape:
            yield f"{name} is missing, unexpected or of another shape"
            continue
        off = float(np.abs(actual - expected).max(initial=0.0))
        size = float(np.abs(expected).max(initial=0.0))
        if not off <= max(FLOAT64_BOUND * size, NOISE * largest[name.partition(".")[0]]):
            yield f"{name} is off by {off:.1e} of {size:.1e}"


def compared(number: int) -> list[str]:
    """Reason why row ``number`` fails; empty if it passes."""
    with tempfile.TemporaryDirectory() as folder:
        size, shared, ours = row(number, folder)
        try:
            baseline = trace_training(RunConfig.from_flat(shared), 1, STEPS)
            found = trace_training(RunConfig.from_flat(ours), size, STEPS)
        except RankFailure as error:
            return str(error).strip().splitlines()[-12:]
    return list(faults(found, baseline))


def described(number: int) -> str:
    """Description of the row: differences from ``BASE``, and additions of the layout."""
    size, shared, ours = row(number)
    model = {name: value for name, value in shared.items() if BASE.get(name) != value}
    layout = {name: value for name, value in ours.items() if shared.get(name) != value}
    return f"row {number}: {size} ranks\n  model {model}\n  layout {layout}"


def main(args: list[str] | None = None) -> int:
    """Compare rows; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="drawn_rows")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args(args)
    wrong, began = 0, time.perf_counter()
    for number in range(options.first, options.first + options.count):
        if found := compared(number):
            wrong += 1
            print(described(number), *(f"  {line}" for line in found[:12]), sep="\n", flush=True)
    print(f"{options.count} rows, {wrong} do not hold; {time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
