"""Multimodal models, which are not supported."""

from megatron_core.drop_in.unsupported import Unsupported, unsupported

_MESSAGE = "multimodal models are not supported; use GPTModel for text"
IGNORE_INDEX = -100
DEFAULT_IMAGE_TOKEN_INDEX = -200
IMAGE_TOKEN = "<image>"
VIDEO_TOKEN = "<video>"
pixel_shuffle = unsupported(_MESSAGE)


class LLaVAModel(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
