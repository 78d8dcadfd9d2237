"""Base class of optimizers that exist only as settings of an engine."""

from typing import Any

import torch

from megatron_core.errors import ConfigError


class SettingsOptimizer(torch.optim.Optimizer):
    """Holds parameter groups and settings; ``deepspeed.initialize`` gives both to the engine, which updates weights."""

    def settings(self) -> dict[str, Any]:
        """Return settings of ``megatron_core.initialize``."""
        raise NotImplementedError

    def step(self, closure: Any = None) -> Any:
        """Refer to the engine."""
        raise ConfigError(
            f"{type(self).__name__}.step(): this optimizer updates weights inside of an engine only; give it to "
            "deepspeed.initialize and call engine.step()"
        )
