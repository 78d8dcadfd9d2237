"""Shards of whole parameters, for optimizers that orthogonalize matrices."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.core.optimizer.config_overrides import is_managed_by_layer_wise_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import shard_divisor, whole_in_shards


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
