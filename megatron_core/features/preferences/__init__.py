"""Fine-tuning on preferences (DPO): pairs of a preferred and a rejected answer."""

from megatron_core.feature import Feature

PREFERENCES = Feature(
    name="preferences",
    is_used=lambda config: config.data.dpo,
    data_part="megatron_core.features.preferences.dataset:PreferenceData",
)
