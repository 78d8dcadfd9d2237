"""Bias and GELU of an MLP's inner features."""

from torch import Tensor

from megatron_core.ops import bias_activation


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """``bias_gelu_impl`` with the bias first."""
    return bias_gelu_impl(y, bias)


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(input + bias) in the tanh approximation, as in Megatron's fused function."""
    return bias_activation(input, bias, "gelu_tanh")
