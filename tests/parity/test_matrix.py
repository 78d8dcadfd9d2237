"""The parity matrix: every layout computes what one process computes.

Each row trains the same tiny model for three steps on the same ragged global batches and compares loss, gradient norm,
every gradient of every step and the weights with one process. Dropout is on: its masks do not depend on the layout.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from megatron_core.config import RunConfig
from tests.parity.trace import Trace, errors, trace

BASE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method_std": 0.1,  # large enough that every part of the model matters to the loss
    "make_vocab_size_divisible_by": 8,
    "seq_length": 16,
    "vocab_size": 101,  # no multiple of anything: every row has padding in its vocabulary
    "mock_data": True,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 10,
    "lr": 1e-2,
    "clip_grad": 0.5,  # below the norms seen here, so that clipping is part of every row
    "fp64": True,
}
TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
SP, V2 = {"sequence_parallel": True}, {"num_virtual_stages_per_pipeline_rank": 2}
ZERO, OVERLAP = (
    {"use_distributed_optimizer": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
)
SMALL_BUCKETS = {"ddp_bucket_size": 3000}
UNTIED = {"untie_embeddings_and_output_weights": True}
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
# Rotary positions: without them a bias on all keys changes no attention weight, and its true gradient is 0.
GQA1 = {
    "group_query_attention": True,
    "num_query_groups": 1,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
}
GQA2 = {"group_query_attention": True, "num_query_groups": 2}
FULL_UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
FULL_BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}

# name: (world size, model and batch of both sides, layout of the row alone)
ROWS: dict[str, tuple[int, dict, dict]] = {
    "tp2": (2, {}, TP2),
    "tp4": (4, {}, TP4),
    "tp2 sp": (2, {}, TP2 | SP),
    "tp4 sp": (4, {}, TP4 | SP),
    "tp2 sp without overlap": (2, {}, TP2 | SP | {"tp_comm_overlap": False}),
    "pp2": (2, {}, PP2),
    "pp4": (4, {}, PP4),
    "pp2 x 2 chunks": (2, {}, PP2 | V2),
    "pp2 x 2 chunks, 3 micro-batches": (2, {"global_batch_size": 3}, PP2 | V2),  # C32
    "pp4, 1 micro-batch": (4, {"global_batch_size": 1}, PP4),  # C32
    "pp4, 3 micro-batches": (4, {"global_batch_size": 3}, PP4),  # C32
    "pp4, 8 micro-batches": (4, {}, PP4),
    "dp2": (2, {}, {}),
    "dp2, overlap": (2, {}, {"overlap_grad_reduce": True} | SMALL_BUCKETS),
    "dp4": (4, {}, {}),
    "dp2 zero1": (2, {}, ZERO),
    "dp2 zero1, overlap": (2, {}, ZERO | OVERLAP | SMALL_BUCKETS),  # C59, C60
    "tp2 pp2": (4, {}, TP2 | PP2),
    "tp2 pp2 sp x 2 chunks": (4, {}, TP2 | PP2 | SP | V2),
    "dp2 pp2 zero1, tied": (4, {}, PP2 | ZERO),  # C10
    "dp2 tp2 pp2": (8, {}, TP2 | PP2),
    "dp2 tp2 pp2 sp zero1 x 2 chunks": (8, {}, TP2 | PP2 | SP | ZERO | V2 | OVERLAP),
    "rank order pp-dp-tp": (8, {}, TP2 | PP2 | {"rank_order": "pp-dp-tp-cp-ep"}),
    "1 group, tp4": (4, GQA1, TP4),  # C19, C18
    "2 groups, tp4": (4, GQA2, TP4),  # C19
    "2 groups, tp4 sp": (4, GQA2, TP4 | SP),
    "2 groups, tp2": (2, GQA2, TP2),
    "1 group, dp2 tp2 zero1": (4, GQA1, TP2 | ZERO),
    "5 layers, pp2": (2, {"num_layers": 5}, PP2),  # C34
    "untied, pp2": (2, UNTIED, PP2),
    "untied, tp2 pp2 sp": (4, UNTIED, TP2 | PP2 | SP),
    "fused attention, tp2 sp": (2, SDPA, TP2 | SP),
    "fused attention, 2 groups, tp4": (4, SDPA | GQA2, TP4),
    "modern, tp2 sp": (2, MODERN, TP2 | SP),
    "modern, tp2 pp2": (4, MODERN, TP2 | PP2),
    "modern, 2 groups, tp4 sp": (4, MODERN | GQA2, TP4 | SP),
    "geglu, tp2": (2, {"geglu": True, "ffn_hidden_size": 64}, TP2),
    "squared relu, tp2": (2, {"squared_relu": True}, TP2),
    "full recompute, uniform, tp2 sp": (2, {}, TP2 | SP | FULL_UNIFORM),
    "full recompute, block, pp2": (2, {}, PP2 | FULL_BLOCK),
    "selective recompute, tp2": (2, {}, TP2 | {"recompute_granularity": "selective"}),
}


@cache
def _truth(settings: tuple[tuple[str, object], ...]) -> Trace:
    return trace(RunConfig.from_flat(dict(settings)), world_size=1)


def _compare(world_size: int, model: dict, layout: dict, extra: dict | None = None) -> tuple[Trace, Trace]:
    shared = BASE | model | (extra or {})
    truth = _truth(tuple(sorted(shared.items())))
    return trace(RunConfig.from_flat(shared | layout), world_size), truth


# C1 C2 C3 C11 C13 C14 C17 C18 C20 C21 C22 C27 C33 C35 C36: what they would change is compared in every row.
@pytest.mark.parametrize("row", ROWS)
def test_layout_computes_what_one_process_computes(row: str) -> None:
    found, truth = _compare(*ROWS[row])
    worst = errors(found, truth)
    name = max(worst, key=worst.get)
    assert worst[name] < 1e-9, f"{name} is off by {worst[name]:.2e}"


@pytest.mark.parametrize("row", ["tp4 sp", "pp4", "dp2 zero1", "dp2 tp2 pp2 sp zero1 x 2 chunks", "1 group, tp4"])
def test_layout_in_float32(row: str) -> None:
    """Loss, norm and gradients within 200 epsilon of float32, weights within 1000.

    A sum of n terms in another order moves by up to n epsilon (Higham 2002, section 4.2); the longest ones here have
    about 100. The weights see it through three steps of Adam, whose division magnifies the error of small
    gradients; ``adam_eps`` 1e-3 keeps elements whose true gradient is 0 (key biases) from moving by rounding alone.
    """
    epsilon = float(np.finfo(np.float32).eps)
    found, truth = _compare(*ROWS[row], {"fp64": False, "adam_eps": 1e-3})
    for name, error in errors(found, truth).items():
        limit = 1000 if name.startswith("weight") else 200
        assert error < limit * epsilon, f"{name} is off by {error / epsilon:.0f} epsilon"


@pytest.mark.parametrize("vocabulary", [50257])
@pytest.mark.parametrize("layout", [TP2, TP4], ids=["tp2", "tp4"])
def test_vocabulary_of_gpt2(vocabulary: int, layout: dict) -> None:  # C21
    """50257 divides by nothing that a layout has."""
    model = {
        "vocab_size": vocabulary,
        "num_layers": 1,
        "make_vocab_size_divisible_by": 128,
        "global_batch_size": 2,
    }
    found, truth = _compare(layout["tensor_model_parallel_size"], model, layout)
    assert max(errors(found, truth).values()) < 1e-9


def test_truth_is_not_trivial() -> None:
    """Were the reference's gradients tiny or its weights still, the matrix would prove nothing. # C52"""
    truth = _truth(tuple(sorted(BASE.items())))
    assert truth.losses[2] != truth.losses[0]
    assert min(truth.norms) > BASE["clip_grad"]
    for name, values in truth.tensors.items():
        assert np.abs(values).max() > 1e-6, f"{name} is all but zero"
