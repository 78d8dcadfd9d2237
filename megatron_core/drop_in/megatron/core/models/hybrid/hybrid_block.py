"""The layers of a hybrid model, which are built by ``HybridModel`` only."""

from megatron_core.drop_in.unsupported import Unsupported

_MESSAGE = "the layers of a hybrid model cannot be built alone; use HybridModel with a hybrid_layer_pattern"


class HybridStack(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class HybridStackSubmodules(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
