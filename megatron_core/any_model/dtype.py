"""The dtype in which a model is trained: that of the settings, else that of its parameters."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError

SWITCHES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
"""Settings by the dtype of weights and activations; without any of them it is float32."""
FIX = "set bf16, fp16 or fp64, or bf16=False for float32"


def sets_dtype(config: Any, settings: RunConfig) -> bool:
    """Whether ``config``, from which ``settings`` were read, chooses the dtype; ``bf16: False`` chooses float32."""
    named = isinstance(config, Mapping) and any(name in config for name in SWITCHES.values())
    return named or any(getattr(settings.training, name) for name in SWITCHES.values())


def with_dtype_of(module: nn.Module, settings: RunConfig, *, is_first: bool) -> RunConfig:
    """Return ``settings``, which choose no dtype, with that of the parameters; the first rank prints a note.

    Errors: ``ConfigError`` if the parameters have several dtypes.
    """
    by_dtype = {p.dtype: name for name, p in module.named_parameters() if p.is_floating_point()}
    if len(by_dtype) > 1 or not by_dtype.keys() <= {torch.float32, *SWITCHES}:
        examples = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
        raise ConfigError(f"the parameters of the model have several dtypes ({examples}): {FIX}")
    switch = next((SWITCHES[dtype] for dtype in by_dtype if dtype in SWITCHES), None)
    if switch is None:
        return settings
    if is_first:
        print(f"note: {switch}=True, the dtype of the model's parameters; {FIX}", file=sys.stderr)
    switched: dict[str, Any] = {switch: True}
    return replace(settings, training=replace(settings.training, **switched))


def refuse_other_dtypes(module: nn.Module) -> None:
    """ConfigError if layers that this rank has constructed are not in float32, though the settings choose no dtype."""
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ConfigError(f"{name} is {parameter.dtype}, and config has no dtype: {FIX}")
