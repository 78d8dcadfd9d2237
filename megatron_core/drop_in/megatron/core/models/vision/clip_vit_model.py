"""Models of images, which are not supported."""

from megatron.core.unsupported import Unsupported, unsupported

_MESSAGE = "models of images are not supported; use GPTModel for text"
get_num_image_embeddings = unsupported(_MESSAGE)


class CLIPViTModel(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
