"""Models of transformers inside Megatron's, which are not supported."""

from megatron.core.unsupported import Unsupported, unsupported

_MESSAGE = "models of transformers inside Megatron's are not supported; import their weights with --load"
get_hf_model_type = unsupported(_MESSAGE)
build_hf_model = unsupported(_MESSAGE)


class HuggingFaceModule(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class AutoHuggingFaceModel(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
