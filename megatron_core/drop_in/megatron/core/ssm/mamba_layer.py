"""State-space layers, which are not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "state-space layers are not supported; use GPTModel"


class MambaLayer(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class MambaLayerSubmodules(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
