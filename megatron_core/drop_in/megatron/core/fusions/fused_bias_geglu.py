"""Bias and gated GELU of an MLP's inner features."""

import torch
from torch import Tensor

from megatron_core.ops import bias_activation


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


def geglu(y: Tensor) -> Tensor:
    """``[..., 2 m]``, gate and value -> gelu(gate) * value ``[..., m]``, in the tanh approximation."""
    return bias_activation(y, None, "geglu_tanh")


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """``geglu(input + bias)``."""
    return bias_activation(input, bias, "geglu_tanh")
