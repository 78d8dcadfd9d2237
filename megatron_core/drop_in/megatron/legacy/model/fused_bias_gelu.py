"""Bias and GELU, at their former path."""

from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
