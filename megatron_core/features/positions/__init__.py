"""Further kinds of positions: rotary ones scaled to longer sequences, linear biases, and a temperature of queries."""

from megatron_core.feature import Feature
from megatron_core.features.positions.settings import PositionConfig, position_problems

POSITIONS = Feature(
    name="positions",
    settings=PositionConfig,
    is_used=lambda config: config.model.rotary_scaling is not None or config.model.attention_steps != (),
    problems=position_problems,
)
