"""Main weights and moments of the optimizer in bfloat16, rounded stochastically."""

from megatron_core.feature import Feature
from megatron_core.features.bf16_state.settings import BF16StateConfig

BF16_STATE = Feature(
    name="bf16_state",
    settings=BF16StateConfig,
    is_used=lambda config: bool(config.optimizer.bf16_settings),
    in_any_model=True,
)
