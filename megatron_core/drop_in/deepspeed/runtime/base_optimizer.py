"""The optimizer that ``deepspeed.initialize`` returns."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megatron_core.errors import CheckpointError
from megatron_core.training.engine import Engine


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """Parameter groups of an engine, and its loss scale."""

    _opt_called = True
    """Read by schedulers of torch, which warn if ``step`` below was not called: the engine calls its own."""

    def __init__(self, engine: Engine, step: Callable[[], object]) -> None:
        # Not torch's constructor: groups, state and defaults are those of the engine's optimizer.
        self._engine, self._inner, self._take_step = engine, engine.optimizer, step

    param_groups = property(lambda self: self._inner.param_groups)
    state = property(lambda self: self._inner.state)
    defaults = property(lambda self: self._inner.defaults)

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        report = self._engine.last_report
        return report is not None and report.skipped

    @property
    def loss_scale(self) -> float:
        """Factor of the losses (fp16)."""
        return self._engine.loss_scale

    @property
    def cur_scale(self) -> float:
        """As ``loss_scale``."""
        return self._engine.loss_scale

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without the loss scale: itself."""
        return self

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As ``engine.step()``."""
        self._take_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears its gradients after each step."""

    def state_dict(self) -> NoReturn:
        """Refer to the checkpoint."""
        raise CheckpointError("optimizer.state_dict(): state is in shards of all ranks; use engine.save_checkpoint")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refer to the checkpoint."""
        raise CheckpointError("optimizer.load_state_dict(): use engine.load_checkpoint")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"


class ZeROOptimizer(DeepSpeedOptimizer):
    """The same with ZeRO 1, 2 or 3."""


class HalfPrecisionOptimizer(DeepSpeedOptimizer):
    """The same at stage 0 with weights in 16 bits; DeepSpeed has three classes for them, which are this one here."""
