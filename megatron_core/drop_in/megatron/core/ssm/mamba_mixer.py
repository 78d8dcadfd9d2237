"""Parts of hybrid models, which are built by ``HybridModel`` only."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "parts of a hybrid model cannot be built alone; use HybridModel with a hybrid_layer_pattern"


class MambaMixer(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class MambaMixerSubmodules(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
