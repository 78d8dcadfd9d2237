"""``megatron_core.tensor_parallel.layers`` at Megatron's path."""

from megatron_core.tensor_parallel.layers import *  # noqa: F403
