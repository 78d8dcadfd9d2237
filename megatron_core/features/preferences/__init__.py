"""Preferences: training on pairs of a chosen and a rejected answer (DPO)."""

from megatron_core.feature import Feature
from megatron_core.features.preferences.rules import other_reference_problems, preference_problems
from megatron_core.features.preferences.settings import PreferenceConfig, has_preferences

PREFERENCES = Feature(
    name="preferences",
    settings=PreferenceConfig,
    is_used=has_preferences,
    problems=preference_problems,
    resume_problems=other_reference_problems,
    objective="megatron_core.features.preferences.objective:Preferences",
    data_part="megatron_core.features.preferences.dataset:PreferenceData",
)
