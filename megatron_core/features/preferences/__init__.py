"""Preferences: training on pairs of a chosen and a rejected answer (DPO)."""

from megatron_core.feature import Feature
from megatron_core.features.preferences.rules import preference_problems, resume_problems
from megatron_core.features.preferences.settings import PreferenceConfig

PREFERENCES = Feature(
    name="preferences",
    settings=PreferenceConfig,
    is_used=lambda config: config.data.dpo,
    problems=preference_problems,
    resume_problems=resume_problems,
    objective="megatron_core.features.preferences.objective:Preferences",
    data_part="megatron_core.features.preferences.dataset:PreferenceData",
)
