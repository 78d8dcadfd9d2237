"""SGD against torch's, and Lion against its formula."""

from __future__ import annotations

import torch

from megatron_core.config import OptimizerConfig
from megatron_core.features.sgd_and_lion.updates import SGD, Lion
from megatron_core.optimizer.rule import Rates, ShardSlice


def _parts(names: tuple[str, ...]) -> tuple[ShardSlice, torch.Tensor]:
    torch.manual_seed(3)
    main = torch.randn(50, dtype=torch.float64)
    part = ShardSlice(torch.zeros_like(main), main.clone(), None, {name: torch.zeros_like(main) for name in names})
    return part, main


def test_sgd_is_torchs() -> None:
    ours, start = _parts(("momentum_buffer",))
    weight = start.clone().requires_grad_()
    theirs = torch.optim.SGD([weight], lr=0.1, momentum=0.8, weight_decay=0.01)
    algorithm = SGD(OptimizerConfig(sgd_momentum=0.8))
    for step in range(1, 5):
        weight.grad = torch.randn(50, dtype=torch.float64)
        ours.grad.copy_(2.0 * weight.grad)
        theirs.step()
        algorithm.update([ours], Rates(step, 0.1, 0.01, 0.5))
    torch.testing.assert_close(ours.main, weight.detach(), rtol=1e-12, atol=1e-14)


def test_lion_is_its_formula() -> None:
    part, weight = _parts(("exp_avg",))
    momentum = torch.zeros_like(weight)
    algorithm = Lion(OptimizerConfig(lion_beta1=0.9, lion_beta2=0.95))
    for step in range(1, 5):
        grad = torch.randn(50, dtype=torch.float64)
        part.grad.copy_(2.0 * grad)
        algorithm.update([part], Rates(step, 0.1, 0.01, 0.5))
        weight = weight - 0.1 * ((0.9 * momentum + 0.1 * grad).sign() + 0.01 * weight)
        momentum = 0.95 * momentum + 0.05 * grad
    torch.testing.assert_close(part.main, weight, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(part.state["exp_avg"], momentum, rtol=1e-12, atol=1e-14)
