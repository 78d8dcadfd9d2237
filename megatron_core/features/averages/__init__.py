"""Evaluation with an exponential moving average of the weights."""

from megatron_core.feature import Feature
from megatron_core.features.averages.rules import average_problems

AVERAGES = Feature(
    name="averages",
    is_used=lambda config: config.optimizer.ema_decay is not None and not config.training.skip_train,
    problems=average_problems,
    run_part="megatron_core.features.averages.weights:AveragedWeights",
)
