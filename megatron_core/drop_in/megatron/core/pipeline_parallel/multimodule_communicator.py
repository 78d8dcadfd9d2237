"""Pipelines of several modules, which are not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "pipelines of several modules are not supported; build one GPTModel"


class MultiModulePipelineCommunicator(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
