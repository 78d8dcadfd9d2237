"""Changes of the layout of a running model, which are not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "changing the layout of a running model is not supported; save a checkpoint and load it in the other layout"


class GlooCopyService(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
