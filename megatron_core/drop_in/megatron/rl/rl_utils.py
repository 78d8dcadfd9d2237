"""Reinforcement learning, which is not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "megatron.rl is not supported; train with rewards in your program, or use --dpo"
calculate_grpo_loss = unsupported(_MESSAGE)
get_logprobs = unsupported(_MESSAGE)
get_rl_runtime_state = unsupported(_MESSAGE)
load_packed_data_by_index = unsupported(_MESSAGE)
selective_log_softmax = unsupported(_MESSAGE)
