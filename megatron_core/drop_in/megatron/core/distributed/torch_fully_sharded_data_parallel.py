"""Megatron Core's path of FSDP2."""

from megatron.core.distributed.fully_sharded import TorchFullyShardedDataParallel
