"""Shards of whole parameters, for optimizers that make matrices orthogonal."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.core.distributed.param_layout import PerBufferParamLayout, lay_out, shard_divisor, whole_in_shards
from megatron.core.optimizer.config_overrides import (
    is_managed_by_layer_wise_optimizer,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron_core.data_parallel.bucket_layout import matrix_work


def tag_params_for_buffer_routing(model_chunks: Sequence[nn.Module]) -> None:
    """Mark each parameter that is trained: whether Muon updates it, so that it lies whole in a shard."""
    for chunk in model_chunks:
        trained: list[Any] = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.is_managed_by_layer_wise_optimizer = is_managed_by_layer_wise_optimizer(parameter)


class LayerWiseDistributedOptimizer(DistributedOptimizer):
    """The optimizer of models that Muon trains: no shard cuts one of its matrices."""

    @staticmethod
    def _shard_divisor(data_parallel_world_size: int, ddp_config: Any) -> int:
        return shard_divisor(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw)

    @staticmethod
    def _compute_per_buffer_param_layout(
        params: Sequence[nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: Sequence[int] | None = None,
    ) -> PerBufferParamLayout:
        rule = whole_in_shards(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw)
        return lay_out(
            params, bucket_size, rule, data_parallel_world_size, param_indices, lambda p: matrix_work(p.shape)
        )
