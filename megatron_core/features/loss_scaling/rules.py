"""Rules of loss scales."""

from collections.abc import Iterator

from megatron_core.config import RunConfig
from megatron_core.features.loss_scaling.settings import LossScaleConfig


def loss_scale_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that the dynamic scale starts within its bounds."""
    settings = config.section(LossScaleConfig)
    if settings.min_loss_scale > settings.initial_loss_scale:
        yield (
            f"min_loss_scale={settings.min_loss_scale} is more than "
            f"initial_loss_scale={settings.initial_loss_scale}; legal: up to {settings.initial_loss_scale}"
        )
