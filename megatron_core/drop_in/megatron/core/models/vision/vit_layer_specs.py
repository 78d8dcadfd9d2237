"""Models of images, which are not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "models of images are not supported; use GPTModel for text"
get_vit_layer_with_local_spec = unsupported(_MESSAGE)
get_vit_layer_with_transformer_engine_spec = unsupported(_MESSAGE)
