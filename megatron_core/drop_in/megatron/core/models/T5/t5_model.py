"""T5, which is not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "T5 is not supported; use GPTModel"


class T5Model(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
