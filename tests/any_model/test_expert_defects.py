"""Planted defects of expert parallelism of a caller's model: the comparison with torch finds each."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_core
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.expert_models import gradient_error, train
from tests.any_model.models import Result, difference, model_of, train_with_torch
from tests.defects.plant import planted

EXPERTS = "any_model.experts:"
ATTENTION = {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.k_proj": "colwise"}
ATTENTION |= {"model.layers.*.self_attn.v_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}
EP2, FEW = "olmoe", "one expert for all"
WHOLE_EXPERTS = "mixtral with its loss"
"""Trained with tensor-parallel attention, and experts that are whole on the ranks of a tensor-parallel group."""
DEFECTS = {
    "gradients of experts are summed over all data-parallel ranks": (
        *(EXPERTS + "_spec_of_part", 'replica_axes=("edp",)', 'replica_axes=("dp", "cp")', EP2),
    ),
    "the weights of the choices are dropped": (
        *(EXPERTS + "_run_local", "sent.probs[:, None])\n", "torch.ones_like(sent.probs)[:, None])\n", EP2),
    ),
    "every rank has the first experts": (EXPERTS + "_keep_part", 'groups.index("ep") * local', "0", EP2),
    "experts are those of the next rank": (
        *(EXPERTS + "_keep_part", 'groups.index("ep") * local', '(1 - groups.index("ep")) * local', EP2),
    ),
    "experts of a tensor-parallel group count twice in the norm": (
        *(EXPERTS + "_spec_of_part", 'groups.index("etp")', "0", WHOLE_EXPERTS),
    ),
    "a rank without tokens takes no part in the exchange of gradients": (
        *(EXPERTS + "_run_local", "len(rows) == 0", "False", FEW),
    ),
    "tokens are sent to the experts of one rank": (
        *(
            "features.experts.dispatch:AllToAll._destinations",
            "holders[routing.experts //",
            "holders[0 * routing.experts //",
        ),
        EP2,
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_comparison_finds(name: str) -> None:
    target, old, new, model = DEFECTS[name]
    with planted(target, old, new):
        try:
            results = _run(model, timeout=20.0)
        except RankFailure:
            return  # an error is found, too
    assert max(_error(result, train_with_torch(model)) for result in results) > 1e-9


@pytest.mark.parametrize("model", [EP2, FEW, WHOLE_EXPERTS])
def test_the_rows_hold_without_defects(model: str) -> None:
    reference = train_with_torch(model)
    assert max(_error(result, reference) for result in _run(model, timeout=120.0)) < 1e-9


def _run(model: str, timeout: float) -> list[Result]:
    return run_ranks(4 if model in (EP2, WHOLE_EXPERTS) else 2, _train, model, timeout=timeout)


def _train(name: str) -> Result:
    settings: dict[str, Any] = {"expert_model_parallel_size": 2}
    if name != WHOLE_EXPERTS:
        return train(name, settings)
    model = megatron_core.parallelize(model_of(name), tensor=2, expert=2, plan=ATTENTION)
    return train(name, {**settings, "tensor_model_parallel_size": 2}, model=model)


def _error(result: Result, reference: Result) -> float:
    return max(difference(result, reference), gradient_error(result, reference))
