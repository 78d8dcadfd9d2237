"""Elementwise optimizers, which can update any slice of a shard: AdamW, SGD, Lion."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_core.config import OptimizerConfig
from megatron_core.ops import Backend, adamw_


@dataclass(frozen=True, eq=False)
class ShardSlice:
    """A slice of a shard: flat tensors of equal length."""

    grad: Tensor
    main: Tensor
    """The main weights, in float32 or wider (stored main weights may also be bfloat16, see ``rounding``)."""
    copy: Tensor | None
    """16-bit weights of the model, set to the rounded ``main``."""
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Rates:
    """The settings shared by all parts of an update."""

    step: int
    """Counted from 1."""
    lr: float
    weight_decay: float
    factor: float
    """Factor on the gradients: clipping and the inverse loss scale."""
    epsilon: float = 1e-8
    """Epsilon of AdamW."""


class AdamW:
    """Loshchilov and Hutter 2019, algorithm 2, in one pass over memory; see ``ops.adamw_``."""

    names = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig, backend: Backend, frozen_after: int | None = None) -> None:
        """``frozen_after``: the last step that updates the variance, for compressed momenta (1-bit Adam)."""
        self.config, self.backend, self.frozen_after = config, backend, frozen_after

    def update(self, parts: Sequence[ShardSlice], rates: Rates) -> None:
        """Update all parts in one launch."""
        if self.frozen_after is not None and rates.step > self.frozen_after:
            self._update_frozen(parts, rates, self.frozen_after)
            return
        adamw_(
            [part.grad for part in parts],
            [part.main for part in parts],
            [part.state["exp_avg"] for part in parts],
            [part.state["exp_avg_sq"] for part in parts],
            [part.copy for part in parts if part.copy is not None],
            step=rates.step,
            lr=rates.lr,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            epsilon=rates.epsilon,
            weight_decay=rates.weight_decay,
            factor=rates.factor,
            backend=self.backend,
        )

    def _update_frozen(self, parts: Sequence[ShardSlice], rates: Rates, frozen: int) -> None:
        """m = b1 m + (1 - b1) g;  w = (1 - lr wd) w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^frozen)) + eps)."""
        beta1, correction = self.config.adam_beta1, 1.0 - self.config.adam_beta2 ** max(frozen, 1)
        for part in parts:
            momentum = part.state["exp_avg"]
            momentum.lerp_(part.grad.mul_(rates.factor).to(momentum.dtype), 1.0 - beta1)
            size = part.state["exp_avg_sq"].div(correction).sqrt_().add_(rates.epsilon)
            part.main.mul_(1.0 - rates.lr * rates.weight_decay)
            part.main.addcdiv_(momentum, size, value=-rates.lr / (1.0 - beta1**rates.step))
            write_copy(part)


class SGD:
    """SGD with momentum, as in torch.optim.SGD: m = mu m + g + wd w; w = w - lr m."""

    names = ("momentum_buffer",)

    def __init__(self, config: OptimizerConfig) -> None:
        self.momentum = config.sgd_momentum

    def update(self, parts: Sequence[ShardSlice], rates: Rates) -> None:
        """Update each part."""
        for part in parts:
            momentum = part.state["momentum_buffer"]
            momentum.mul_(self.momentum).add_(part.grad, alpha=rates.factor)
            if rates.weight_decay:
                momentum.add_(part.main, alpha=rates.weight_decay)
            part.main.add_(momentum, alpha=-rates.lr)
            write_copy(part)


class Lion:
    """Chen et al. 2023, algorithm 2: w = w - lr (sign(b1 m + (1 - b1) g) + wd w); m = b2 m + (1 - b2) g."""

    names = ("exp_avg",)

    def __init__(self, config: OptimizerConfig) -> None:
        self.betas = config.lion_beta1, config.lion_beta2

    def update(self, parts: Sequence[ShardSlice], rates: Rates) -> None:
        """Update each part."""
        beta1, beta2 = self.betas
        for part in parts:
            momentum = part.state["exp_avg"]
            grad = part.grad.mul_(rates.factor).to(momentum.dtype)
            direction = torch.lerp(grad, momentum, beta1).sign_()
            part.main.mul_(1.0 - rates.lr * rates.weight_decay).add_(direction, alpha=-rates.lr)
            momentum.lerp_(grad, 1.0 - beta2)
            write_copy(part)


def write_copy(part: ShardSlice) -> None:
    """Copy the main weights to the weights of the model, with rounding to their dtype."""
    if part.copy is not None:
        part.copy.copy_(part.main)
