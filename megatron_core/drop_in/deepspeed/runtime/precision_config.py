"""The sections ``bf16`` and ``fp16``."""

import math
from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from megatron_core.errors import ConfigError


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section ``bf16``."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section ``fp16``; errors: ``ConfigError`` for a scale that is not a number or out of range."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict, **data)
        scale = self.loss_scale
        if isinstance(scale, bool) or not isinstance(scale, int | float | str):
            raise ConfigError(f"fp16.loss_scale={scale!r} must be a number")
        self.loss_scale = float(scale)
        if not 0 <= self.loss_scale < math.inf:
            raise ConfigError(f"fp16.loss_scale={scale!r} must be a finite number >= 0")
        for key in ("loss_scale_window", "min_loss_scale"):
            value = getattr(self, key)
            if self.enabled and not self.loss_scale and (type(value) is not int or value < 1):
                raise ConfigError(f"fp16.{key}={value!r} must be an integer >= 1")


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section ``bf16``, or the one under its old name ``bfloat16``."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section ``fp16``."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))
