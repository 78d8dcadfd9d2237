"""Data parallelism of FSDP, which is not supported under these names."""

from megatron_core.drop_in.unsupported import Unsupported

_INSTEAD = (
    "is not supported; DistributedDataParallelConfig(data_parallel_sharding_strategy='optim_grads_params') shards"
)


class FullyShardedDataParallel(Unsupported):
    """Megatron FSDP."""

    message = f"FullyShardedDataParallel {_INSTEAD} weights, gradients and optimizer state"


class TorchFullyShardedDataParallel(Unsupported):
    """FSDP2 of torch."""

    message = f"TorchFullyShardedDataParallel {_INSTEAD} weights, gradients and optimizer state"
