"""Optimizer, loss scale and learning rate; names for Megatron Core's users are imported when they are first used."""

from typing import TYPE_CHECKING

from megatron_core.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_core.optimizer.config_overrides import (
        ParamGroupOverride,
        get_mup_config_overrides,
        get_standard_config_overrides,
    )
    from megatron_core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron_core.optimizer.factory import get_megatron_optimizer
    from megatron_core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron_core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
    from megatron_core.optimizer.optimizer_config import (
        OptimizerConfig,
        ParamKey,
        ParamPredicate,
        ParamWithNamePredicate,
    )

__getattr__ = lazy_names(__name__, __file__)
