"""All tokens go to one expert for two steps, with NaN in uninitialized memory: the other experts do not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.bounds import FLOAT64_BOUND, relative_errors
from megatron_core.verify.gpt import RaggedDataset
from megatron_core.verify.ranks import run_ranks, this_world
from megatron_core.verify.trace import RankTrace, assemble
from tests.parity.moe_rows import ALL_GATHER, EP2, OVERLAP, PADDED, SMALL, SP, TP2, ZERO
from tests.parity.rows import BASE

MODEL = SMALL | {
    "moe_router_score_function": "sigmoid",
    "moe_router_topk": 1,
    "moe_router_enable_expert_bias": True,
    "poison_buffers": True,
}


def _train(settings: dict) -> RankTrace:
    run = set_up(RunConfig.from_flat(BASE | MODEL | settings), this_world())
    run.train_loader = run.loader(RaggedDataset(run.vocab_size, run.config.data.seq_length, None))
    for stage in run.stages.values():
        for layer in stage.decoder.layers.values():
            layer.mlp.router.expert_bias.data[0] = 100.0
    trace = RankTrace()
    hooks = StepHooks(before_update=lambda: trace.add_gradients(run.data_parallel, run.state.iteration))
    for _ in range(2):
        result = train_step(run, hooks=hooks)
        assert all(load[1:] == [0, 0, 0, load[-1]] for load in result.expert_load.values())
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    trace.add_weights(run.data_parallel, run.stages.values())
    torch.use_deterministic_algorithms(False)
    return trace


# C9
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, EP2), (2, EP2 | ALL_GATHER), (4, EP2 | TP2 | SP | ZERO | OVERLAP), (2, EP2 | PADDED)],
    ids=["ep2", "ep2 allgather", "dp2 tp2 sp ep2 zero1 overlap", "ep2 padded"],
)
def test_all_tokens_to_one_expert(ranks: int, layout: dict) -> None:
    model = {name: value for name, value in layout.items() if name in PADDED}
    expected = assemble(run_ranks(1, _train, model))
    found = assemble(run_ranks(ranks, _train, layout))
    assert found.faults == []
    assert max(relative_errors(found, expected).values()) < FLOAT64_BOUND
    for step in range(2):
        for layer in range(2):
            for matrix in ("linear_fc1", "linear_fc2"):
                grad = found.tensors[f"grad{step}.decoder.layers.{layer}.mlp.experts.{matrix}.weight"]
                assert np.abs(grad[0]).max() > 1e-4 and not grad[1:].any()
