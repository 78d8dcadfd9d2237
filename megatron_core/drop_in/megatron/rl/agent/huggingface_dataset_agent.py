"""Reinforcement learning, which is not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "megatron.rl is not supported; train with rewards in your program, or use --dpo"


class HFDatasetAgent(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
