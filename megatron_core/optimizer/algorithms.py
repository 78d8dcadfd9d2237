"""The update rule of AdamW, which works on any slice of a shard; features and programs add others.

``rule`` has the base classes. The rows of the table, in ``config.optimizers``, name the rules.
"""

from collections.abc import Callable, Sequence

from megatron_core.config import OptimizerConfig
from megatron_core.config.optimizers import OptimizerKind, add_optimizer
from megatron_core.feature import load_hook
from megatron_core.ops import Backend, adamw_
from megatron_core.optimizer.rule import NEVER_CORRECTED, Algorithm, Rates, ShardSlice
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
