"""For Megatron Core's users: bias and GELU of an MLP's inner features."""

from torch import Tensor

from megatron_core.ops import activation


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(input + bias) in the tanh approximation, as Megatron's fused function has it."""
    return activation.bias_gelu(input, bias, "tanh")
