"""Reinforcement learning, which is not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "megatron.rl is not supported; train with rewards in your program, or use --dpo"
get_default_packed_seq_params = unsupported(_MESSAGE)
