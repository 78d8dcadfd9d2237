"""Activation functions of an MLP."""

from torch import Tensor, nn

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import squared_relu


def fast_gelu(x: Tensor) -> Tensor:
    """GELU in the tanh approximation."""
    return nn.functional.gelu(x, approximate="tanh")
