"""Multimodal models, which are not supported."""

from megatron_core.drop_in.unsupported import Unsupported

_MESSAGE = "multimodal models are not supported; use GPTModel for text"
MIMO_LANGUAGE_MODULE_KEY = "language"


class ModuleLayout(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class RankRole(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
