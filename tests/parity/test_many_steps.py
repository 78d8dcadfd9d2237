"""Copies on several ranks are bitwise equal, even after many steps in float32."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.verify import trace_training

STEPS = 20
BASE = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "make_vocab_size_divisible_by": 8,
    "seq_length": 8,
    "vocab_size": 29,
    "mock_data": True,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": STEPS,
    "lr": 1e-2,
    "adam_eps": 1e-3,  # an element whose true gradient is 0 must not change by rounding only
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
HEAD_NORMS = {
    "qk_layernorm": True,
    "group_query_attention": True,
    "num_query_groups": 1,
    "position_embedding_type": "rope",
}
CASES: dict[str, tuple[int, dict, dict]] = {
    "tp2 sp": (2, {}, TP2 | SP),
    "norms of heads, 1 group, tp2": (2, HEAD_NORMS, TP2),
    "norms of heads, 1 group, dp2 tp2 sp zero1": (4, HEAD_NORMS, TP2 | SP | {"use_distributed_optimizer": True}),
    "tied, tp2 pp2": (4, {}, TP2 | PP2),  # C11
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("case", CASES)
def test_replicas_are_equal_after_many_steps(case: str) -> None:  # C53
    """A trace records ranks with different bits of a weight or gradient; the losses show that training happened."""
    ranks, model, layout = CASES[case]
    alone = trace_training(RunConfig.from_flat(BASE | model), 1, STEPS)
    found = trace_training(RunConfig.from_flat(BASE | model | layout), ranks, STEPS)
    assert found.faults == []
    assert len(found.losses) == STEPS
    assert found.losses == pytest.approx(alone.losses, rel=1e-4)
    assert max(found.losses) > 1.01 * min(found.losses)
