"""Initializers, masks and GELU variants, at their former path."""

from megatron.core.transformer.utils import attention_mask_func, erf_gelu, openai_gelu
from megatron.core.utils import init_method_normal, scaled_init_method_normal
