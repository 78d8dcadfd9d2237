"""Megatron-LM's sample order, for runs that started with Megatron-LM: the same batches for the same seed."""

from megatron_core.datasets.megatron_order.build import (
    MegatronOrderedBlend,
    MegatronOrderedDataset,
    build_megatron_order,
)
from megatron_core.datasets.megatron_order.mock import MockSequences, build_mock_order
from megatron_core.datasets.megatron_order.order import samples_wanted
