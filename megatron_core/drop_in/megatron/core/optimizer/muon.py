"""The earlier name of ``get_megatron_optimizer`` for Muon."""

from typing import Any

from megatron.core.optimizer.factory import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig


def get_megatron_muon_optimizer(
    config: OptimizerConfig, *args: Any, layer_wise_distributed_optimizer: bool = False, **settings: Any
) -> MegatronOptimizer:
    """Return ``get_megatron_optimizer(config, ...)``; ``layer_wise_distributed_optimizer`` has no effect.

    Whether matrices are sharded whole follows from the wrapper's ``use_distributed_optimizer``.
    """
    return get_megatron_optimizer(config, *args, **settings)
