"""Update rules of the core's optimizers, which work on any slice of a shard; features and programs add others.

``rule`` has the base classes. The rows of the table, in ``config.optimizers``, name the rules.
"""

from collections.abc import Callable, Sequence

import torch

from megatron_core.config import OptimizerConfig
from megatron_core.config.optimizers import OptimizerKind, add_optimizer
from megatron_core.errors import ConfigError
from megatron_core.feature import load_hook
from megatron_core.ops import Backend, adamw_
from megatron_core.optimizer.rule import NEVER_CORRECTED, Algorithm, Rates, ShardSlice, write_copy
from megatron_core.parallel.groups import ParallelGroups


class AdamW(Algorithm):
    """Loshchilov and Hutter 2019, algorithm 2, in one pass over memory; see ``ops.adamw_``."""

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        """Update all parts in one launch."""
        adamw_(
            [piece.grad for piece in pieces],
            [piece.main for piece in pieces],
            [piece.state["exp_avg"] for piece in pieces],
            [piece.state["exp_avg_sq"] for piece in pieces],
            [piece.copy for piece in pieces if piece.copy is not None],
            step=rates.step if self.config.adam_bias_correction else NEVER_CORRECTED,
            lr=rates.lr,
            betas=rates.betas or (self.config.adam_beta1, self.config.adam_beta2),
            epsilon=rates.epsilon,
            weight_decay=rates.weight_decay,
            factor=rates.factor,
            backend=self.backend,
        )


class SGD(Algorithm):
    """As torch.optim.SGD: m = mu m + g + wd w; w = w - lr m. Without momentum (mu = 0) there is no state."""

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


UpdateRule = Callable[[OptimizerConfig, Backend, ParallelGroups], Algorithm]
"""Constructor of an update rule: a subclass of ``Algorithm``, or a function that returns an instance of one."""

_REGISTERED: dict[str, UpdateRule] = {}
"""Update rules that programs have registered, by the names of their rows."""


def update_rule(row: OptimizerKind) -> UpdateRule:
    """The update rule of a row of the table of optimizers."""
    return _REGISTERED[row.name] if row.rule is None else load_hook(row.rule)


def register_optimizer(row: OptimizerKind, rule: UpdateRule) -> None:
    """Make an optimizer from outside of this package available as ``--optimizer NAME``.

    Call this on every rank before the configuration is checked. Settings of its own are arguments of ``rule``
    (``functools.partial``). Errors: ``ConfigError`` if the name is taken.
    """
    add_optimizer(row)
    _REGISTERED[row.name] = rule
