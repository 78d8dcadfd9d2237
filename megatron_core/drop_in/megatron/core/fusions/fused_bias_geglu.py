"""Bias and gated GELU of an MLP's inner features."""

from torch import Tensor

from megatron_core.ops import bias_activation
from megatron_core.ops.reference import quick_gelu as quick_gelu


def geglu(y: Tensor) -> Tensor:
    """``[..., 2 m]``, gate and value -> gelu(gate) * value ``[..., m]``, in the tanh approximation."""
    return bias_activation(y, None, "geglu_tanh")


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """``geglu(input + bias)``."""
    return bias_activation(input, bias, "geglu_tanh")
