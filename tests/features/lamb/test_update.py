"""LAMB against its formula."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import DataParallel
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups


@pytest.mark.parametrize("correction", ["moments", "rate", "none"])
def test_lamb_is_its_formula(correction: Literal["moments", "rate", "none"]) -> None:
    """Also where a limit of the factor applies, and where the weights are zero; ``rate`` is DeepSpeed's kernel."""
    model = nn.Linear(6, 5, dtype=torch.float64)
    model.bias.data.zero_()
    groups = ParallelGroups.single()
    data = DataParallel({0: model}, groups)
    limits = {"lamb_min_coeff": 0.5, "lamb_max_coeff": 0.7}
    config = OptimizerConfig(
        optimizer="lamb", clip_grad=0.0, weight_decay=0.1, lamb_bias_correction=correction, **limits
    )
    optimizer = Optimizer(data, config, groups, LossScale(1.0))
    generator = torch.Generator().manual_seed(3)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in weights.items()}
    for step in (1, 2, 3):
        for name, parameter in model.named_parameters():
            grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.main_grad.copy_(grad)
            m, v = moments[name]
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad.square()
            moments[name] = m, v
            decay = 0.1 if name == "weight" else 0.0
            first, second = 1 - 0.9**step, 1 - 0.999**step
            rate = 0.01 * (second**0.5 / first if correction == "rate" else 1.0)
            if correction != "moments":
                first = second = 1.0
            r = m / first / ((v / second).sqrt() + 1e-8) + decay * weights[name]
            size = weights[name].norm() / r.norm()
            factor = 1.0 if weights[name].norm() == 0 else min(max(size.item(), 0.5), 0.7)
            weights[name] = weights[name] - rate * factor * r
        assert not optimizer.step(0.01, 1.0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-12, atol=1e-14)
