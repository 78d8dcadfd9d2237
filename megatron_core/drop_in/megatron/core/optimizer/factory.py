"""Selects the optimizer for a model's wrapper."""

from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer.config_overrides import ParamGroupOverride
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey
from megatron.core.process_groups_config import check_groups
from megatron_core.errors import ConfigError


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: dict[ParamKey, ParamGroupOverride] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """Return the optimizer of models in ``DistributedDataParallel``; ``use_gloo_process_groups`` has no effect.

    ``config_overrides`` has settings of selected parameters, by default ``get_standard_config_overrides(config)``.
    Raises ConfigError for a model without the wrapper, or for contradictory overrides.
    """
    check_groups(pg_collection, ("tp", "pp", "mp", "dp", "dp_cp", "expt_dp"), "get_megatron_optimizer")
    if dump_param_to_param_group_map:
        raise ConfigError("get_megatron_optimizer: dump_param_to_param_group_map is not supported; remove it")
    row = config.translated().kind_of(hidden=True)
    if not model_chunks or not all(hasattr(chunk, "data_parallel") for chunk in model_chunks):
        raise ConfigError("get_megatron_optimizer needs models that are wrapped by DistributedDataParallel")
    shards = any(chunk.ddp_config.zero_stage for chunk in model_chunks)
    narrow = any(bucket.weights.element_size() < 4 for chunk in model_chunks for bucket in chunk.buckets)
    for_matrices = row.scalar_optimizer is not None
    for chunk in model_chunks if for_matrices else ():
        chunk.separate_matrices()
    sharded = LayerWiseDistributedOptimizer if for_matrices else DistributedOptimizer
    kind = sharded if shards else Float16OptimizerWithFloat16Params if narrow else FP32Optimizer
    return kind(config, model_chunks, config_overrides)
