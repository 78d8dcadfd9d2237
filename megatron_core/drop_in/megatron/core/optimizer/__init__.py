"""Optimizers with Megatron Core's names."""

from megatron.core.optimizer.config_overrides import (
    ParamGroupOverride,
    get_mup_config_overrides,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS
from megatron.core.optimizer.factory import get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
)
from megatron.core.utils import log_single_rank
