"""``megatron_core.tensor_parallel.random`` at Megatron's path."""

from megatron_core.tensor_parallel.random import *  # noqa: F403
