"""Megatron-LM's loss without --calculate-per-token-loss: the mean over micro-batches of means over their tokens."""

from megatron_core.feature import Feature
from megatron_core.features.mean_of_means.settings import MeanOfMeansConfig, other_loss_problems, uses_mean_of_means

MEAN_OF_MEANS = Feature(
    name="mean_of_means",
    settings=MeanOfMeansConfig,
    is_used=uses_mean_of_means,
    problems=other_loss_problems,
    objective="megatron_core.features.mean_of_means.objective:MeanOfMeans",
)
