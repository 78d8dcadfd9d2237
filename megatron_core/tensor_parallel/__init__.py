"""Layers split over the tensor-parallel ranks."""

from typing import TYPE_CHECKING

from megatron_core.lazy import lazy_names
from megatron_core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_core.tensor_parallel.data import broadcast_data
from megatron_core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron_core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron_core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron_core.tensor_parallel.options import ModelParallelConfig
from megatron_core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    KeyedDropout,
    checkpoint,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron_core.tensor_parallel.utils import (
    VocabUtility,
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)

if TYPE_CHECKING:
    from megatron_core.tensor_parallel.attributes import (
        copy_tensor_model_parallel_attributes,
        param_is_not_tensor_parallel_duplicate,
        set_defaults_if_not_set_tensor_model_parallel_attributes,
        set_tensor_model_parallel_attributes,
    )
    from megatron_core.tensor_parallel.mappings import all_to_all, all_to_all_hp2sp, all_to_all_sp2hp
    from megatron_core.tensor_parallel.random import get_expert_parallel_rng_tracker_name

__getattr__ = lazy_names(__name__, __file__)
