"""The factor of the loss, for gradients that would underflow in the dtype of the weights."""

import torch

from megatron_core.config import OptimizerConfig
from megatron_core.errors import ConfigError
from megatron_core.feature import load_hook


class LossScale:
    """A constant scale; 1 means no scaling. Derived classes change it after steps."""

    def __init__(self, scale: float = 1.0) -> None:
        """Set the scale; ``ConfigError`` unless it is above 0."""
        if scale <= 0:
            raise ConfigError(f"loss_scale={scale} is out of range; legal: a number above 0")
        self.scale = self.minimum = float(scale)

    def update(self, found_inf: bool) -> None:
        """Do nothing: overflows do not change a constant scale."""

    def state_dict(self) -> dict[str, float]:
        """Return an empty state: after loading, the configured scale applies."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore ``state``, including the state of a dynamic scale."""


def make_loss_scale(config: OptimizerConfig, params_dtype: torch.dtype) -> LossScale:
    """Return the scale of these settings for weights of ``params_dtype``."""
    # bfloat16 has the exponents of float32, so gradients do not underflow.
    if params_dtype != torch.float16 or config.scale_rule is None:
        return LossScale()
    return load_hook(config.scale_rule)(config)
