"""Multimodal models, which are not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "multimodal models are not supported; use GPTModel for text"


class AudioModalitySubmodules(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
