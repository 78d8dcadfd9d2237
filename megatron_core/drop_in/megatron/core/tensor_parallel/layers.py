"""``megatron_core.tensor_parallel.layers`` at Megatron's path."""

from megatron_core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ModelParallelConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
