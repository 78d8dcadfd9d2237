"""Megatron-LM's order of samples, for runs that began there: the same batches for the same seed."""

from megatron_core.datasets.megatron_order.build import (
    MegatronOrderedBlend,
    MegatronOrderedDataset,
    build_megatron_order,
)
from megatron_core.datasets.megatron_order.order import samples_wanted
