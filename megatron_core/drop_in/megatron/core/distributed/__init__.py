"""Data parallelism and the reduction of gradients."""

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.fully_sharded import FullyShardedDataParallel, TorchFullyShardedDataParallel
