"""BERT, which is not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "BERT is not supported; use GPTModel"


class BertModel(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
