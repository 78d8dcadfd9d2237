"""``deepspeed.moe`` against DeepSpeed's own layer: outputs, gradients, and training with expert parallelism."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating
from deepspeed.moe.utils import has_moe_layers, is_moe_param
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed.experts import (
    Job,
    Layer,
    Model,
    freeze_biases,
    groups_of_parameters,
    run_layer,
    save_and_load,
    train,
)
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

FOUR: dict[str, Any] = {"num_experts": 4}
LAYERS = {
    "top1": Layer({**FOUR}),
    "top1 without random selection": Layer({**FOUR, "use_rts": False}),
    "top1 with all tokens": Layer({**FOUR, "drop_tokens": False}, used_tokens=True),
    "top1 drawn": Layer({**FOUR, "noisy_gate_policy": "RSample", "capacity_factor": 0.5}),
    "top1 with jitter": Layer({**FOUR, "noisy_gate_policy": "Jitter", "use_residual": True}),
    "top1 in evaluation": Layer({**FOUR, "noisy_gate_policy": "RSample", "eval_capacity_factor": 2.0}, training=False),
    "top2": Layer({**FOUR, "k": 2}, returns_bias=True),
    "top2 without drawing": Layer({**FOUR, "k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.6}),
    "top2 with all tokens": Layer({**FOUR, "k": 2, "drop_tokens": False, "use_residual": True}),
    "top3": Layer({**FOUR, "k": 3, "capacity_factor": 0.7, "use_residual": True}),
    "top3 with all tokens": Layer({**FOUR, "k": 3, "drop_tokens": False}),
    "top2 in bfloat16": Layer({**FOUR, "k": 2}, dtype="bfloat16"),
}
CONFIG = {"train_micro_batch_size_per_gpu": 2}
TWO: dict[str, Any] = {**FOUR, "ep_size": 2, "min_capacity": 0}
JOBS = [
    Job("zero0", {**TWO}),
    Job("zero1", {**TWO, "k": 2, "use_residual": True}, zero=1),
    Job("zero2", {**TWO, "drop_tokens": False}, zero=2, splits_groups=True),
    Job("copies-zero1", {**TWO}, zero=1, ranks=4, splits_groups=True),
    Job("copies-zero2", {**TWO, "k": 3, "num_experts": 6}, zero=2, ranks=4),
    Job("zero3", {**TWO}, zero=3),
    Job("alone-zero2", {**TWO, "ep_size": 1}, zero=2),
]

pytestmark = pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")


@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_equal(name: str) -> None:
    case = LAYERS[name]
    ours = run_layer(asdict(case))
    theirs = ask(Task("tests.drop_in.deepspeed.experts:run_layer", (asdict(case),)))
    # The gate computes in float32, and its loss in another order; all else in float64.
    bound = 1e-6 if case.dtype == "float64" else 2e-2
    assert ours[2] == theirs[2] and sum(ours[2]) > 0
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)
    for ours_of, theirs_of in ((ours[0], theirs[0]), (ours[3], theirs[3])):
        np.testing.assert_allclose(ours_of, theirs_of, rtol=bound, atol=bound)
    assert ours[4].keys() == theirs[4].keys()
    for parameter, gradient in theirs[4].items():
        np.testing.assert_allclose(ours[4][parameter], gradient, rtol=bound, atol=bound, err_msg=parameter)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("job", JOBS, ids=[job.name for job in JOBS])
def test_training_is_equal(job: Job) -> None:
    ours = run_ranks(job.ranks, train, asdict(job))[0]
    lower = replace(job, zero=min(job.zero, 2))  # DeepSpeed has no such layers at stage 3
    theirs = ask(Task("tests.drop_in.deepspeed.experts:train", (asdict(lower),), job.ranks))
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=2e-5)
    for one, other in zip(ours["weights"], theirs["weights"], strict=True):
        assert one == pytest.approx(other, rel=2e-5)
    experts = [values["experts.0.deepspeed_moe.experts.deepspeed_experts.0.up.weight"] for values in ours["weights"]]
    assert len(set(experts)) == job.arguments["ep_size"]  # copies are equal, other experts differ


@pytest.mark.parametrize("largest", (None, 200))
def test_groups_of_parameters_are_equal(largest: int | None) -> None:
    function = "tests.drop_in.deepspeed.experts:groups_of_parameters"
    theirs = [row for row in ask(Task(function, (largest,))) if row[3] or row[1] is None]  # without empty groups
    assert sorted(groups_of_parameters(largest), key=str) == sorted(theirs, key=str)
    assert any(moe for _, moe, _, _ in theirs)


def test_checkpoints_and_names_of_all_experts(tmp_path: Path) -> None:
    first, second, names = run_ranks(2, save_and_load, str(tmp_path))[0]
    assert first == second and first[0] != first[2]
    assert [f"experts.1.deepspeed_moe.experts.deepspeed_experts.{expert}.up.bias" in names for expert in range(5)] == [
        *[True] * 4,
        False,
    ]
    one_rank = Model({"num_experts": 4})
    freeze_biases(one_rank)
    trained = {name for name, parameter in one_rank.named_parameters() if parameter.requires_grad}
    assert torch.load(tmp_path / "trained.bin").keys() == trained


def test_errors_name_the_argument() -> None:
    model = MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=2)
    assert has_moe_layers(model) == (True, 4) and is_moe_param(model.deepspeed_moe.experts.deepspeed_experts[0].weight)
    with pytest.raises(ConfigError, match=r"ep_size=2 has no ranks"):
        model(torch.randn(8, 8))
    with pytest.raises(ConfigError, match=r"3 tokens are fewer than min_capacity=4"):
        top1gating(torch.randn(3, 4), 1.0, 4)
    with pytest.raises(ValueError, match="drop_policy='last'"):
        topkgating(torch.randn(8, 4), 3, 1.0, 0, drop_policy="last")
    with pytest.raises(ConfigError, match="used_token with k=2"):
        MoE(8, nn.Linear(8, 8), num_experts=4, k=2)(torch.randn(8, 8), torch.ones(8))
    for arguments, message in (
        ({"use_tutel": True}, "use_tutel=True"),
        ({"enable_expert_tensor_parallelism": True}, "enable_expert_tensor_parallelism=True"),
        ({"noisy_gate_policy": "Noise"}, "noisy_gate_policy='Noise'"),
    ):
        with pytest.raises(ConfigError, match=message):
            MoE(8, nn.Linear(8, 8), **arguments)
    with pytest.raises(LayoutError, match=r"num_experts=3 cannot be divided by ep_size=2"):
        MoE(8, nn.Linear(8, 8), num_experts=3, ep_size=2)
    with pytest.raises(LayoutError, match=r"ep_size \[2, 4\]"):
        deepspeed.initialize(model=nn.Sequential(model, MoE(8, nn.Linear(8, 8), 4, ep_size=4)), config=CONFIG)


@pytest.mark.parametrize("k", (1, 2, 3))
def test_dense_weights_have_the_routes(k: int) -> None:
    logits = torch.randn(16, 4, generator=torch.Generator().manual_seed(k))
    gate = {1: top1gating, 2: top2gating}.get(k) or partial(topkgating, k=k)
    options: dict[str, Any] = {1: {"use_rts": False}, 2: {"top2_2nd_expert_sampling": False}}.get(k, {})
    _, combine, mask, _ = gate(logits, capacity_factor=0.7, min_capacity=0, **options)
    routes = gate(logits, capacity_factor=0.7, min_capacity=0, sparse_routes=True, **options)
    expected = torch.zeros_like(combine)
    for choice in range(k):
        for token, expert in enumerate(routes.experts[choice].tolist()):
            if expert >= 0:
                expected[token, expert, routes.rows[choice, token]] += routes.weights[choice, token]
    torch.testing.assert_close(combine, expected)
    assert torch.equal(mask, expected > 0) and 0 < mask.sum() < 16 * k
