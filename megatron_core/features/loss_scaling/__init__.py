"""Loss scales of float16."""

from megatron_core.feature import Feature
from megatron_core.features.loss_scaling.settings import LossScaleConfig, loss_scale_problems

LOSS_SCALING = Feature(
    name="loss_scaling",
    settings=LossScaleConfig,
    is_used=lambda config: config.training.fp16,
    problems=loss_scale_problems,
    in_any_model=True,
)
