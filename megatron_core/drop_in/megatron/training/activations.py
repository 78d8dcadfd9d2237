"""Activation functions at their former path."""

from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
