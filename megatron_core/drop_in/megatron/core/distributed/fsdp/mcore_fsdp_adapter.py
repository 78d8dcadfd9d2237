"""Megatron Core's path of Megatron FSDP."""

from megatron.core.distributed.fully_sharded import FullyShardedDataParallel
