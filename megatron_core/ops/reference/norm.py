"""RMSNorm and LayerNorm."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim (Zhang and Sennrich 2019)."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim (Ba et al. 2016)."""
    return functional.layer_norm(x, weight.shape, weight, bias, epsilon)
