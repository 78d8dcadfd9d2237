"""Muon of DeepSpeed's JSON against DeepSpeed 0.19.8's formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.translation import translate
from deepspeed.utils import safe_get_full_fp32_param
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed import SHARDS

STEPS, BATCH, WIDTH = 4, 4, 6
PARAMS = {"lr": 0.05, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "ns_method": "gram"}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.narrow(torch.tanh(self.wide(self.embed(x)))) - 1).square().mean()


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model()


def _samples(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def _orthogonal(matrix: Tensor) -> Tensor:
    """``zeropower_via_newtonschulz5`` of DeepSpeed without its casts."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _reference() -> dict[str, Tensor]:
    """Weights after ``muon_update`` of hidden matrices, and AdamW with DeepSpeed's defaults of the others."""
    model = _model().double()
    hidden = [model.wide.weight, model.narrow.weight]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    adam = torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    momenta = [torch.zeros_like(p) for p in hidden]
    for step in range(STEPS):
        model.zero_grad()
        model(_samples(step).double()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        with torch.no_grad():
            for weight, momentum in zip(hidden, momenta, strict=True):
                momentum.lerp_(weight.grad, 1 - 0.9)
                update = _orthogonal(weight.grad.lerp(momentum, 0.9))
                update *= max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.mul_(1 - 0.05 * 0.1).sub_(update, alpha=0.05)
    return {name: p.detach() for name, p in model.named_parameters()}


def _trained(zero: dict[str, Any]) -> dict[str, Any]:
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "Muon", "params": PARAMS},
        "zero_optimization": zero,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=_model(), config=config)
    assert type(optimizer.optimizer).__name__ == "MuonWithAuxAdam"
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(STEPS):
        engine.backward(engine(_samples(step).chunk(size)[rank]))
        engine.step()
    return {name: safe_get_full_fp32_param(p).numpy().copy() for name, p in engine.module.named_parameters()}


@pytest.mark.every_case
@pytest.mark.parametrize(("ranks", "zero"), [(1, {"stage": 0}), (2, {"stage": 1}), (2, {"stage": 3, **SHARDS})])
def test_weights_are_those_of_the_formula(ranks: int, zero: dict[str, Any]) -> None:
    wanted = _reference()
    for weights in run_ranks(ranks, _trained, zero, backend="gloo"):
        for name, weight in weights.items():
            torch.testing.assert_close(torch.from_numpy(weight).double(), wanted[name], rtol=2e-4, atol=2e-5, msg=name)


def test_wrong_parameters_are_refused() -> None:
    config: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "muon", "params": {"ns_method": "svd"}}}
    with pytest.raises(ConfigError, match="ns_method='svd' must be one of gram, standard"):
        translate(config, 1)
    config["optimizer"]["params"] = {"per_head_muon": True}
    with pytest.raises(ConfigError, match="per_head_muon=True"):
        translate(config, 1)
    config["optimizer"]["params"] = {"muon_lr": 0.1}
    with pytest.raises(ConfigError, match=r"Muon with tensor_parallel\.autotp_size=2: set it to 1"):
        translate({**config, "tensor_parallel": {"autotp_size": 2}}, 2)
    with pytest.raises(ConfigError, match="weight has 4 dimensions; use AdamW"):
        deepspeed.initialize(model=nn.Conv2d(1, 1, 1), config=config)
