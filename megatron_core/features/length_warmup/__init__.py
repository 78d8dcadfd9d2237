"""Sequences that are short at the start of a training; their length is a ramp of the feature ``batch_growth``."""

from megatron_core.feature import Feature
from megatron_core.features.length_warmup.settings import LengthWarmupConfig, warmup_problems

LENGTH_WARMUP = Feature(
    name="length_warmup",
    settings=LengthWarmupConfig,
    is_used=lambda config: config.data.section(LengthWarmupConfig).seq_length_warmup is not None,
    problems=warmup_problems,
)
