"""Export to TensorRT-LLM, which is not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "export to TensorRT-LLM is not supported; export to Hugging Face's format"


class TRTLLMHelper(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
