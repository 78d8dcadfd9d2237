"""The settings of loss scales, and their rule."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import RunConfig
from megatron_core.config import ranges as r
from megatron_core.config.conditions import TRAINING
from megatron_core.config.setting import Condition, Resume, given, section, setting
from megatron_core.config.training import OptimizerConfig

DYNAMIC = Condition(
    "--fp16 with a dynamic loss scale", lambda run: run.training.fp16 and run.optimizer.loss_scale is None
)


@dataclass(frozen=True, kw_only=True)
@section(when=TRAINING, resume=Resume.REPORTED)
class LossScaleConfig(OptimizerConfig):
    """Loss scale of float16."""

    loss_scale: float | None = setting(None, r.POSITIVE, needs=given("fp16"), is_refinement=True)
    """Constant loss scale for --fp16; default: dynamic."""
    initial_loss_scale: float = setting(2.0**32, r.POSITIVE, when=DYNAMIC)
    """First value of the dynamic loss scale."""
    min_loss_scale: float = setting(1.0, r.POSITIVE, when=DYNAMIC, aliases="min_scale")
    """Smallest value of the dynamic loss scale."""
    loss_scale_window: int = setting(1000, r.COUNT, when=DYNAMIC)
    """Number of consecutive steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = setting(2, r.COUNT, when=DYNAMIC)
    """Number of steps with overflow after which the dynamic loss scale is halved."""

    @property
    def scale_rule(self) -> str:
        """See ``OptimizerConfig``."""
        return "megatron_core.features.loss_scaling.scale:loss_scale_of"


def loss_scale_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that the dynamic scale starts within its bounds."""
    settings = config.section(LossScaleConfig)
    if settings.min_loss_scale > settings.initial_loss_scale:
        yield (
            f"min_loss_scale={settings.min_loss_scale} is more than "
            f"initial_loss_scale={settings.initial_loss_scale}; legal: up to {settings.initial_loss_scale}"
        )
