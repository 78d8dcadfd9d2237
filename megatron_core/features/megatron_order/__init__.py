"""Megatron-LM's sample order, for runs that started with Megatron-LM: the same batches for the same seed."""

from megatron_core.feature import Feature
from megatron_core.features.megatron_order.settings import (
    MegatronOrderConfig,
    finite_order_problems,
    has_megatrons_order,
)

MEGATRON_ORDER = Feature(
    name="megatron_order",
    settings=MegatronOrderConfig,
    is_used=has_megatrons_order,
    problems=finite_order_problems,
    data_part="megatron_core.features.megatron_order.part:OrderedData",
)
