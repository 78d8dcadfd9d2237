"""Token dispatchers, which are parts of the engine's layer of experts."""

from megatron_core.drop_in.unsupported import Unsupported

_MESSAGE = "token dispatchers cannot be used alone; set moe_token_dispatcher_type, and build a MoELayer"


class MoETokenDispatcher(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Stands for Megatron's class; building it raises ConfigError."""


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Stands for Megatron's class; building it raises ConfigError."""


class MoEFlexTokenDispatcher(MoETokenDispatcher):
    """Stands for Megatron's class; building it raises ConfigError."""
