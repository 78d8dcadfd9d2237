"""For Megatron Core's users: bias and gated SiLU of an MLP's inner features."""

from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import bias_activation


def swiglu(y: Tensor) -> Tensor:
    """``[..., 2 m]``, gate and value -> silu(gate) * value ``[..., m]``."""
    return bias_activation(y, None, "swiglu")


def bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
) -> Tensor:
    """``swiglu(input + bias)``; only ``input`` is kept for backward. ConfigError for the two switches."""
    if fp8_input_store or cpu_offload_input:
        raise ConfigError("fp8_input_store and cpu_offload_input are not supported; leave them out")
    return bias_activation(input, bias, "swiglu")


def weighted_bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False
) -> Tensor:
    """``swiglu(input)`` times a weight for each token, ``[tokens, 1]``, in the dtype of ``input``. ConfigError with a
    bias, as in Megatron Core."""
    if bias is not None:
        raise ConfigError("weighted_bias_swiglu_impl takes no bias; pass None")
    return (bias_swiglu_impl(input, None, fp8_input_store) * weights).to(input.dtype)
