"""Flags of launch scripts for Megatron-LM, its forks, and the Trainer of transformers, that are not settings here."""

from megatron_core.feature import Feature

MEGATRON_FLAGS = Feature(
    name="megatron_flags",
    is_used=lambda config: False,  # nothing is left of them in a configuration
    spellings="megatron_core.features.megatron_flags.spellings:MegatronSpellings",
)
