"""The sections ``bf16`` and ``fp16``."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from deepspeed.runtime.config_utils import DeepSpeedConfigModel, section_as


def _number(value: Any) -> Any:
    """Refuse what pydantic would convert, such as true."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    return value


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section ``bf16``."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section ``fp16``; ``loss_scale`` 0: a dynamic loss scale."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)] = 0
    initial_scale_power: int = 16
    loss_scale_window: Annotated[int, BeforeValidator(_number)] = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[int, BeforeValidator(_number)] = 1
    fp16_master_weights_and_grads: bool = False

    @model_validator(mode="after")
    def _check_dynamic_scale(self) -> "DeepSpeedFP16Config":
        for key in ("loss_scale_window", "min_loss_scale"):
            if self.enabled and not self.loss_scale and getattr(self, key) < 1:
                raise ValueError(f"fp16.{key}={getattr(self, key)} must be an integer >= 1 with a dynamic loss scale")
        return self


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section ``bf16``, or the one under its old name ``bfloat16``."""
    return section_as(DeepSpeedBF16Config, "bf16", param_dict.get("bf16") or param_dict.get("bfloat16") or {})


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section ``fp16``."""
    return section_as(DeepSpeedFP16Config, "fp16", param_dict.get("fp16") or {})
