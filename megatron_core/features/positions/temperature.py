"""A temperature of queries that depends on their position."""

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.features.positions.settings import PositionConfig
from megatron_core.ops.rows import wide
from megatron_core.transformer.context import AttentionStep, LayerContext


class QueryTemperature(AttentionStep):
    """Multiplies queries of layers without rotary positions, or with ``query_temperature_of_rotary`` of the others.

    The factor is 1 + a ln(1 + floor((position + 1) / f)) with ``query_temperature_scale`` a and
    ``query_temperature_floor`` f; with ``query_temperature_of_rotary`` position in place of position + 1.
    Source: Llama 4, Ministral 3; Nakanishi 2025, arXiv 2501.19399.
    """

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        config = context.config.section(PositionConfig)
        self.is_active = config.has_rotary(layer_number) == config.query_temperature_of_rotary

    @staticmethod
    def of_positions(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The factor ``[s, b]``."""
        settings = config.section(PositionConfig)
        first = 0 if settings.query_temperature_of_rotary else 1
        steps = (position_ids.t() + first) // settings.query_temperature_floor
        return 1.0 + settings.query_temperature_scale * torch.log1p(steps.to(wide(dtype)))

    def __call__(self, query: Tensor, key: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the queries."""
        return (query * factor[..., None, None]).to(query.dtype) if self.is_active else query, key
