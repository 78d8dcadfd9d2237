"""Torch's FlexAttention and variable-length attention, which GPUs use for windows, bounded scores and documents."""

from megatron_core.feature import Feature
from megatron_core.features.flex_attention.rules import flex_problems

FLEX_ATTENTION = Feature(
    name="flex_attention",
    is_used=lambda config: config.model.attention_backend == "flex",
    problems=flex_problems,
    layers={"fused_attention": "megatron_core.features.flex_attention.kernels:attend_on_gpu"},
    check_device="megatron_core.features.flex_attention.kernels:check_flex",
)
