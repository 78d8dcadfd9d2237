"""The optimizers of models with a sharding wrapper, the layout of their buffers, and their selection."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
)
from megatron.core.optimizer.optimizer_config import (
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    is_managed_by_layer_wise_optimizer,
)
from megatron.core.optimizer.param_layout import (
    FullParamLayout,
    PerBufferParamLayout,
    group_params_for_buffers,
    in_order,
    lay_out,
    shard_divisor,
    whole_in_shards,
)
from megatron.core.process_groups_config import check_groups
from megatron_core.data_parallel import Bucket
from megatron_core.data_parallel.bucket_layout import FillRule
from megatron_core.errors import ConfigError


class Range:
    """The elements start ... end - 1."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.size = start, end, end - start


class DistributedOptimizer(MixedPrecisionOptimizer):
    """``MegatronOptimizer`` of ``DistributedDataParallel`` with ``use_distributed_optimizer``."""

    _rule: Callable[[int, bool], FillRule] = staticmethod(in_order)
    """The rule that fills buckets, from the number of shards and ``pad_buckets_for_high_nccl_busbw``."""

    @classmethod
    def _compute_per_buffer_param_layout(
        cls,
        params: Sequence[nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: Sequence[int] | None = None,
    ) -> PerBufferParamLayout:
        rule = cls._rule(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw)
        return lay_out(params, bucket_size, rule, data_parallel_world_size, param_indices)

    @classmethod
    def compute_full_param_layout(
        cls,
        params: Sequence[nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        expert_data_parallel_world_size: int | None = None,
    ) -> FullParamLayout:
        """Return the layout of each buffer; experts are sharded over ``expert_data_parallel_world_size``."""
        layouts = {}
        for key, (members, indices) in group_params_for_buffers(params, ddp_config.grad_reduce_in_fp32).items():
            size = expert_data_parallel_world_size if key.is_expert_parallel else None
            layouts[key] = cls._compute_per_buffer_param_layout(
                members, bucket_size, size or data_parallel_world_size, ddp_config, indices
            )
        return FullParamLayout(layouts)

    @staticmethod
    def _build_model_gbuf_range(param_and_grad_buffer: Any, bucket_index: int) -> dict[str, Any]:
        """Return this rank's elements of each parameter of a bucket, as ranges of the parameter and of the shard."""
        bucket: Bucket = param_and_grad_buffer.buckets[bucket_index].bucket
        ranges = {
            parameter: {"param": Range(start, stop), "gbuf_local": Range(at, at + stop - start)}
            for _, parameter, start, stop, at in bucket.pieces()
        }
        return {"param_map": ranges}

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        """The names of the moments; with Muon those of the parameters that it does not update."""
        return tuple(moment.name for moment in self._own.kind_of(hidden=False).moments(self._own))

    def _get_state_key_dtype(self, key: str) -> torch.dtype:
        moments = self._own.kind_of(hidden=False).moments(self._own)
        is_bf16 = any(moment.name == key and moment.is_bf16(self._own) for moment in moments)
        return torch.bfloat16 if is_bf16 else torch.float32


def tag_params_for_buffer_routing(model_chunks: Sequence[nn.Module]) -> None:
    """Mark each trained parameter: whether Muon updates it, so that a shard must contain all of it."""
    for chunk in model_chunks:
        trained: list[Any] = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.is_managed_by_layer_wise_optimizer = is_managed_by_layer_wise_optimizer(parameter)


class LayerWiseDistributedOptimizer(DistributedOptimizer):
    """The optimizer of models that Muon trains: no shard contains only a part of a matrix."""

    _rule = staticmethod(whole_in_shards)

    @staticmethod
    def _shard_divisor(data_parallel_world_size: int, ddp_config: Any) -> int:
        return shard_divisor(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw)


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[Any],
    config_overrides: dict[ParamKey, ParamGroupOverride] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """Return the optimizer of models in ``DistributedDataParallel``; ``use_gloo_process_groups`` has no effect.

    ``config_overrides`` has settings of selected parameters, by default ``get_standard_config_overrides(config)``. With
    ``use_layer_wise_distributed_optimizer`` ranks share the state of an optimizer of matrices, such as Muon. Raises
    ConfigError for a model without the wrapper, or for contradictory overrides.
    """
    check_groups(pg_collection, ("tp", "pp", "mp", "dp", "dp_cp", "expt_dp"), "get_megatron_optimizer")
    if dump_param_to_param_group_map:
        raise ConfigError("get_megatron_optimizer: dump_param_to_param_group_map is not supported; remove it")
    row = config.translated().kind_of(hidden=True)
    if not model_chunks or not all(hasattr(chunk, "data_parallel") for chunk in model_chunks):
        raise ConfigError("get_megatron_optimizer needs models that are wrapped by DistributedDataParallel")
    for_matrices = row.scalar_optimizer is not None
    for chunk in model_chunks if for_matrices else ():
        chunk.separate_matrices(sharded=config.use_layer_wise_distributed_optimizer)
    shards = any(chunk.ddp_config.zero_stage for chunk in model_chunks)
    narrow = any(bucket.weights.element_size() < 4 for chunk in model_chunks for bucket in chunk.buckets)
    sharded = LayerWiseDistributedOptimizer if for_matrices else DistributedOptimizer
    kind = sharded if shards else Float16OptimizerWithFloat16Params if narrow else FP32Optimizer
    return kind(config, model_chunks, config_overrides)


def get_megatron_muon_optimizer(
    config: OptimizerConfig, *args: Any, layer_wise_distributed_optimizer: bool = False, **settings: Any
) -> MegatronOptimizer:
    """Return ``get_megatron_optimizer(config, ...)``; ``layer_wise_distributed_optimizer`` is the config's setting."""
    if layer_wise_distributed_optimizer:
        named: Any = {"use_layer_wise_distributed_optimizer": True}
        config = replace(config, **named)
    return get_megatron_optimizer(config, *args, **settings)
