"""20 steps of 1-bit Adam, 1-bit LAMB and 0/1 Adam on two ranks are those of DeepSpeed's optimizers.

``onebit_reference.json`` has DeepSpeed's weights; ``record_onebit.py`` recorded them. Gradients are given numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.data_parallel import DataParallel
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.grid import Grid
from megatron_core.training.setup import data_parallel_of
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted

SHAPES = {"first": (16, 8), "second": (8, 16), "third": (16, 16)}
"""Buckets of these matrices need no padding, alone or together."""
STEPS = 20
BETAS = {"betas": (0.8, 0.95), "eps": 1e-3}
LAMB = {**BETAS, "freeze_step": 7, "coeff_beta": 0.7}
ZERO_ONE = {**BETAS, "var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adam": (
        "onebit-adam",
        {**BETAS, "freeze_step": 6, "weight_decay": 0.1},
        {"grad_compression_warmup_iters": 6, "adam_bias_correction": False, "weight_decay": 0.1},
    ),
    "lamb": (
        "onebit-lamb",
        {**LAMB, "factor_max": 1.4, "factor_min": 0.7, "factor_threshold": 0.05, "weight_decay": 1.0},
        {
            "grad_compression_warmup_iters": 7,
            "onebit_lamb_coeff_beta": 0.7,
            "onebit_lamb_factor_max": 1.4,
            "onebit_lamb_factor_min": 0.7,
            "onebit_lamb_factor_threshold": 0.05,
            "weight_decay": 1.0,
        },
    ),
    "lamb, without decay, with limits": (
        "onebit-lamb",
        {**LAMB, "max_coeff": 1.0, "min_coeff": 0.35, "factor_threshold": 0.01},
        {
            "grad_compression_warmup_iters": 7,
            "onebit_lamb_coeff_beta": 0.7,
            "onebit_lamb_factor_threshold": 0.01,
            "lamb_max_coeff": 1.0,
            "lamb_min_coeff": 0.35,
            "weight_decay": 0.0,
        },
    ),
    "zero-one": (
        "zero-one-adam",
        {**ZERO_ONE, "weight_decay": 0.1},
        {
            "zero_one_var_freeze_step": 9,
            "zero_one_var_update_scaler": 2,
            "zero_one_local_step_scaler": 4,
            "zero_one_local_step_clipper": 4,
            "weight_decay": 0.1,
        },
    ),
}
"""Compression, DeepSpeed's parameters, and settings. DeepSpeed freezes 0/1 Adam's variance a step later."""


def _numbers(shape: tuple[int, ...], phase: int) -> Tensor:
    """Numbers without a pattern, computed from integers."""
    k = torch.arange(shape[0] * shape[1])
    return ((k * k * 37 + k * (101 + phase) + phase * phase * 17) % 251 / 251.0 - 0.5).double().view(shape)


def start(name: str) -> Tensor:
    """Initial weights."""
    return (4.0 if name == "third" else 1.0) * _numbers(SHAPES[name], len(name))


def gradient(name: str, step: int, rank: int) -> Tensor:
    """The gradient of a rank in a step, of other size for each tensor, and smaller after 10 steps."""
    size = (1.0 + 3.0 * list(SHAPES).index(name)) * (0.3 if step > 10 else 1.0)
    return size * (_numbers(SHAPES[name], 7) + 0.5 * _numbers(SHAPES[name], 100 * rank + step))


def rate(step: int) -> float:
    """The learning rate of a step."""
    return 0.02 / (1.0 + 0.1 * step)


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(start(name)))


def _trained(method: str, settings: dict[str, Any], stage: int) -> dict[str, list[float]]:
    torch.set_default_dtype(torch.float64)
    config = RunConfig.from_flat(
        {
            "grad_compression": method,
            "zero_stage": stage,
            "ddp_bucket_size": 10_000 if method == "onebit-lamb" else 1,
            "optimizer": "lamb" if method == "onebit-lamb" else "adam",
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "adam_eps": 1e-3,
            "clip_grad": 0.0,
        }
        | settings
    )
    groups, model = ParallelGroups(Grid(dp=2), dist.get_rank()), Matrices()
    data = data_parallel_of(DataParallel, config, {0: model}, groups, torch.device("cpu"))
    assert all(bucket.weights.numel() == bucket.end for bucket in data.buckets), "no padding"
    optimizer = Optimizer(data, config.optimizer, groups, LossScale(1.0))
    for step in range(1, STEPS + 1):
        data.zero_grad()
        for bucket in data.buckets:
            bucket.open_grads()
        for name, weight in model.named_parameters():
            weight.main_grad.copy_(gradient(name, step, dist.get_rank()) / dist.get_world_size())
        data.finish_grad_sync()
        assert not optimizer.step(rate(step), optimizer.gradient_norm().item())
        data.start_param_sync()
    assert not optimizer.has_local_changes, "the last step synchronizes"
    return {name: weight.detach().flatten().tolist() for name, weight in model.named_parameters()}


def _difference(case: str, stage: int = 0) -> float:
    """Largest difference to DeepSpeed's weights; they change by about 0.3."""
    reference = json.loads(Path(__file__).with_name("onebit_reference.json").read_text())["weights"][case]
    method, _, settings = CASES[case]
    worst = 0.0
    for found in run_ranks(2, _trained, method, settings, stage):
        for name, expected in reference.items():
            worst = max(worst, *(abs(a - b) for a, b in zip(found[name], expected, strict=True)))
    return worst


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_deepspeeds(case: str) -> None:
    assert _difference(case) < 1e-9


@pytest.mark.parametrize("stage", [1, 2])
def test_sharded_steps_of_lamb_are_deepspeeds(stage: int) -> None:
    assert _difference("lamb", stage) < 1e-9


LAMB_UPDATE, ADAM_UPDATE = (
    "features.compression.updates:OneBitLAMBUpdate.",
    "features.compression.updates:ZeroOneAdamUpdate.",
)
DEFECTS = {
    "the fresh variance starts at 0": (
        "lamb",
        LAMB_UPDATE + "update",
        'piece.state[FRESH].copy_(piece.state["exp_avg_sq"])',
        "pass",
    ),
    "the factor ignores the decay": ("lamb", LAMB_UPDATE + "_factors", "largest * share + 1.0 - share", "largest"),
    "a factor may change without limit": (
        "lamb, without decay, with limits",
        LAMB_UPDATE + "_factors",
        "previous * (1.0 + threshold)",
        "limited",
    ),
    "the mean coefficient is the last one": (
        *("lamb", LAMB_UPDATE + "coefficients"),
        *("beta * means[:, 0] + (1.0 - beta) * coefficients", "coefficients"),
    ),
    "one scale for all tensors": (
        *("lamb", LAMB_UPDATE + "coefficients"),
        *("means[:, 2] = self._message_factors(bucket, shard)", "pass"),
    ),
    "a coefficient of 1 counts": (
        *("lamb, without decay, with limits", LAMB_UPDATE + "coefficients"),
        *("torch.where(coefficients == 1.0, means[:, 0]", "torch.where(coefficients == 0.6, means[:, 0]"),
    ),
    "the interval of the variance never doubles": (
        *("zero-one", "features.compression.signs:ZeroOnePolicy.updates_variance"),
        *("interval = 2 * interval", "pass"),
    ),
    "the interval of local steps never doubles": (
        *("zero-one", "features.compression.signs:ZeroOnePolicy.synchronizes"),
        *("2 ** min(doublings, 62)", "1"),
    ),
    "errors of gradients stay": (
        "zero-one",
        "features.compression.signs:ZeroOneAdam.commit",
        "self._errors.clear()",
        "pass",
    ),
    "the local momentum stays": (
        *("zero-one", ADAM_UPDATE + "synchronize"),
        *("torch.mul(summed[run], -1.0 / total if total > 0.0 else 0.0", "torch.mul(shard.state['exp_avg'][run], 1.0"),
    ),
    "changes are summed without the variance": (
        *("zero-one", ADAM_UPDATE + "synchronize"),
        *('shard.state["exp_avg_sq"][run].sqrt().add_(rates.epsilon)', "1.0"),
    ),
    "local gradients are a part of the sum": (
        *("zero-one", "features.compression.signs:ZeroOneAdam.reduce_"),
        *("bucket.grads.mul_(bucket.dp_group.size())", "pass"),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_differs_from_deepspeed(name: str) -> None:
    case, place, old, new = DEFECTS[name]
    with planted(place, old, new):
        assert _difference(case) > 1e-4
