"""Batches that grow during a training."""

from megatron_core.feature import Feature
from megatron_core.features.batch_growth.rules import batch_growth_problems, grows
from megatron_core.features.batch_growth.settings import BatchGrowthConfig

BATCH_GROWTH = Feature(
    name="batch_growth",
    settings=BatchGrowthConfig,
    is_used=grows,
    problems=batch_growth_problems,
)
