"""Rotary positions scaled to longer sequences: interpolation, Llama 3, YaRN, LongRoPE, and larger bases."""

from megatron_core.feature import Feature
from megatron_core.features.rope_scaling.settings import RopeScalingConfig, rope_scaling_problems

ROPE_SCALING = Feature(
    name="rope_scaling",
    settings=RopeScalingConfig,
    is_used=lambda config: config.model.rotary_scaling is not None,
    problems=rope_scaling_problems,
)
