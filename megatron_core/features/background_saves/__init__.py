"""Checkpoints that a thread writes while training continues."""

from megatron_core.feature import Feature
from megatron_core.features.background_saves.settings import BackgroundSavesConfig

BACKGROUND_SAVES = Feature(
    name="background_saves",
    settings=BackgroundSavesConfig,
    is_used=lambda config: config.section(BackgroundSavesConfig).async_save,
    saver="megatron_core.features.background_saves.saver:BackgroundSaver",
    in_any_model=True,
)
