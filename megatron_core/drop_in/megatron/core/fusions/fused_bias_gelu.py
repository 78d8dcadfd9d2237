"""Bias and GELU of an MLP's inner features."""

from torch import Tensor

from megatron_core.ops import bias_activation


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(input + bias) in the tanh approximation, as Megatron's fused function has it."""
    return bias_activation(input, bias, "gelu_tanh")
