"""The optimizer of models with a sharding wrapper, and the layout of its buffers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.optimizer.param_layout import (
    FullParamLayout,
    PerBufferParamLayout,
    group_params_for_buffers,
    in_order,
    lay_out,
)
from megatron_core.data_parallel import Bucket
from megatron_core.data_parallel.bucket_layout import FillRule


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
