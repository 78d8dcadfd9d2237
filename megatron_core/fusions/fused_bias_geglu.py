"""For Megatron Core's users: bias and gated GELU of an MLP's inner features."""

from torch import Tensor

from megatron_core.ops import activation


def geglu(y: Tensor) -> Tensor:
    """``[..., 2 m]``, gate and value -> gelu(gate) * value ``[..., m]``, in the tanh approximation."""
    return activation.bias_geglu(y, None, "tanh")


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """``geglu(input + bias)``."""
    return activation.bias_geglu(input, bias, "tanh")
