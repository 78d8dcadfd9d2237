"""Activation functions of an MLP."""

from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import squared_relu
from megatron.core.transformer.utils import openai_gelu as fast_gelu
