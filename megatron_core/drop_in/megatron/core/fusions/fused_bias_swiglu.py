"""Bias and gated SiLU of an MLP's inner features."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_core.errors import ConfigError
from megatron_core.ops import bias_activation


def swiglu(y: Tensor) -> Tensor:
    """``[..., 2 m]``, gate and value -> silu(gate) * value ``[..., m]``."""
    return bias_activation(y, None, "swiglu")


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """``swiglu(y + bias)``."""
    return bias_activation(y, bias, "swiglu")


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """``swiglu(input + bias)``, which saves only ``input`` for backward; ConfigError for the two switches.

    With ``clamp_value`` c: silu(min(gate, c)) * max(-c, min(value, c)), at least in float32.
    """
    if fp8_input_store or cpu_offload_input:
        raise ConfigError("fp8_input_store and cpu_offload_input are not supported; remove them")
    if clamp_value is None:
        return bias_activation(input, bias, "swiglu")
    if not clamp_value > 0:
        raise ConfigError(f"clamp_value={clamp_value} must be > 0, or None for no limit")
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    gate, value = (wide if bias is None else wide + bias).chunk(2, -1)
    return (silu(gate.clamp(max=clamp_value)) * value.clamp(-clamp_value, clamp_value)).to(input.dtype)


def weighted_bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """``bias_swiglu_impl(input)`` times a weight for each token, ``[tokens, 1]``, in the dtype of ``input``.

    Raises ConfigError with a bias, as Megatron Core does.
    """
    if bias is not None:
        raise ConfigError("weighted_bias_swiglu_impl takes no bias; pass None")
    return (bias_swiglu_impl(input, None, fp8_input_store, clamp_value=clamp_value) * weights).to(input.dtype)
