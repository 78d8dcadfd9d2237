"""For Megatron Core's users: data parallelism of models and the completion of their gradients."""

from megatron_core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron_core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_core.distributed.finalize_model_grads import finalize_model_grads
