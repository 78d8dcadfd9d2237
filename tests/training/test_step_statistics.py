"""The norm of the weights, zeros in the gradient, and a weight decay that changes, in any layout."""

from __future__ import annotations

import pytest
import torch

from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

LOGGED = {"log_params_norm": True, "log_num_zeros_in_grad": True, "fp64": True, "swiglu": True, "ffn_hidden_size": 48}
# Embeddings of tokens that do not occur have the gradient 0, whatever is rounded.
LOGGED |= {"untie_embeddings_and_output_weights": True}
LAYOUTS = [
    (2, {"tensor_model_parallel_size": 2}),
    (2, {"use_distributed_optimizer": True}),
    (2, {"pipeline_model_parallel_size": 2}),
    (2, {"zero_stage": 3}),
]


def _statistics(settings: dict) -> tuple[float, ...]:
    run = tiny_run(**LOGGED | settings)
    return tuple(train_step(run).statistics)


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=["tp2", "dp2 zero1", "pp2", "dp2 zero3"])
def test_layout_changes_nothing(world_size: int, layout: dict) -> None:  # C13 C14
    squares, zeros = _statistics({})
    for found in run_ranks(world_size, _statistics, layout):
        assert found == (pytest.approx(squares, rel=1e-12), pytest.approx(zeros, abs=4))


def test_one_process_against_its_weights_and_gradients() -> None:
    run = tiny_run(**LOGGED)
    rows = run.vocab_size
    weights = [
        p.detach()[:rows] if "word_embeddings" in name else p.detach()
        for name, p in run.stages[0].named_global_parameters()
    ]
    squares = sum(float(weight.square().sum()) for weight in weights)
    found = train_step(run).statistics
    assert found[0] == pytest.approx(squares, rel=1e-12)
    seen = torch.unique(torch.cat([batch["tokens"] for batch in run.train_loader.step(0, 4)]))
    assert found[1] == pytest.approx((rows - len(seen)) * run.config.model.hidden_size, abs=4) and found[1] > 4


def _weights_after(steps: int, **settings: object) -> torch.Tensor:
    run = tiny_run(lr_decay_style="constant", **settings)
    for _ in range(steps):
        train_step(run)
    return torch.cat([p.detach().flatten() for p in run.stages[0].parameters()])


def test_weight_decay_of_each_step_is_the_schedules() -> None:
    """Over 8 steps from 0 to 0.8 the first one has 0.1, and the second one more."""
    growing = {"start_weight_decay": 0.0, "end_weight_decay": 0.8, "weight_decay_incr_style": "linear"}
    constant = {"weight_decay": 0.1}
    torch.testing.assert_close(_weights_after(1, **growing), _weights_after(1, **constant), rtol=1e-7, atol=0)
    assert (_weights_after(2, **growing) - _weights_after(2, **constant)).abs().max() > 1e-6
