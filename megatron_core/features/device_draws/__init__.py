"""Initial weights drawn on the GPU that holds them, with the bits of those that a CPU draws."""

from megatron_core.feature import Feature

DEVICE_DRAWS = Feature(
    name="device_draws",
    is_used=lambda config: True,
    draw_weights="megatron_core.features.device_draws.draws:fill_normal",
)
