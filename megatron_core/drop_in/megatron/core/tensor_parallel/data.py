"""``megatron_core.tensor_parallel.data`` at Megatron's path."""

from megatron_core.tensor_parallel.data import broadcast_data
