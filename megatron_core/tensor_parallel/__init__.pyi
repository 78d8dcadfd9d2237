from .cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from .layers import ColumnParallelLinear as ColumnParallelLinear
from .layers import ModelParallelConfig as ModelParallelConfig
from .layers import RowParallelLinear as RowParallelLinear
from .layers import VocabParallelEmbedding as VocabParallelEmbedding
from .layers import linear_with_frozen_weight as linear_with_frozen_weight
from .layers import (
    linear_with_grad_accumulation_and_async_allreduce as linear_with_grad_accumulation_and_async_allreduce,
)
from .random import CudaRNGStatesTracker as CudaRNGStatesTracker
from .random import KeyedDropout as KeyedDropout
from .random import checkpoint as checkpoint
from .random import get_cuda_rng_tracker as get_cuda_rng_tracker
from .random import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
