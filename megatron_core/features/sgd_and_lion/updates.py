"""Update rules of SGD and Lion, which work on any slice of a shard."""

from collections.abc import Sequence

import torch

from megatron_core.errors import ConfigError
from megatron_core.features.sgd_and_lion.settings import MomentumConfig
from megatron_core.optimizer.rule import Algorithm, Rates, ShardSlice, write_copy


class SGD(Algorithm):
    """As torch.optim.SGD: m = mu m + g + wd w; w = w - lr m. Without momentum (mu = 0) there is no state."""

    config: MomentumConfig

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        """Update each part."""
        momentum = self.config.sgd_momentum if rates.momentum is None else rates.momentum
        # State is allocated when the optimizer is built, so that a checkpoint can be loaded before the first step.
        if momentum and not self.config.sgd_momentum:
            raise ConfigError(
                f"momentum={momentum} in a parameter group of SGD without momentum, which has no state for it; "
                "construct the optimizer with a momentum above 0"
            )
        for piece in pieces:
            if self.config.sgd_momentum:
                step = piece.state["momentum_buffer"]
                step.mul_(momentum).add_(piece.grad, alpha=rates.factor)
            else:
                step = piece.grad.to(piece.main.dtype) * rates.factor
            if rates.weight_decay:
                step.add_(piece.main, alpha=rates.weight_decay)
            piece.main.add_(step, alpha=-rates.lr)
            write_copy(piece)


class Lion(Algorithm):
    """Chen et al. 2023, algorithm 2: w = w - lr (sign(b1 m + (1 - b1) g) + wd w); m = b2 m + (1 - b2) g."""

    config: MomentumConfig

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        """Update each part."""
        beta1, beta2 = rates.betas or (self.config.lion_beta1, self.config.lion_beta2)
        for piece in pieces:
            momentum = piece.state["exp_avg"]
            # In place: the gradient is not needed after the update.
            grad = piece.grad.mul_(rates.factor).to(momentum.dtype)
            direction = torch.lerp(grad, momentum, beta1).sign_()
            piece.main.mul_(1.0 - rates.lr * rates.weight_decay).add_(direction, alpha=-rates.lr)
            momentum.lerp_(grad, 1.0 - beta2)
            write_copy(piece)
