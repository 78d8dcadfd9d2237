"""Attention by blocks of queries and by documents, on two ranks, against the formula for whole sequences on one."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.transformer import core_attention
from megatron_core.verify import trace_training
from megatron_core.verify.bounds import Bounds
from tests.parity.rows import BASE, GQA2, PACKED, TP2
from tests.parity.test_matrix import faults

MODEL = BASE | GQA2 | {"num_layers": 2, "attn_logit_softcapping": 2.0, "window_size": (6, 0)}
CP2 = {"context_parallel_size": 2, "cp_comm_type": ("a2a",)}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("model", "layout"), [(PACKED, TP2), ({}, CP2), (PACKED, CP2)], ids=["documents, tp2", "cp2", "documents, cp2"]
)
def test_blocks_on_two_ranks(model: dict, layout: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, bounded scores and a window; blocks of 3 queries in sequences of 16 tokens."""
    monkeypatch.setattr(core_attention, "QUERY_BLOCK", 3)
    reference = trace_training(RunConfig.from_flat(MODEL | model | {"attention_backend": "unfused"}), 1)
    found = trace_training(RunConfig.from_flat(MODEL | model | layout), 2)
    assert faults(found, reference, Bounds("float64")) == []
