"""Parts of hybrid models, which are built by ``HybridModel`` only."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "parts of a hybrid model cannot be built alone; use HybridModel with a hybrid_layer_pattern"


class MambaLayer(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class MambaLayerSubmodules(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
