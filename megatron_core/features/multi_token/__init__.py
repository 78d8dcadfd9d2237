"""Multi-token prediction: layers after the last one that predict tokens after the next one, in training."""

from megatron_core.feature import Feature
from megatron_core.features.multi_token.settings import MultiTokenConfig, multi_token_problems

MULTI_TOKEN = Feature(
    name="multi_token",
    settings=MultiTokenConfig,
    problems=multi_token_problems,
    is_used=lambda config: config.model.mtp_num_layers is not None,
    layers={"multi_token": "megatron_core.features.multi_token.block:MultiTokenPredictionBlock"},
)
