"""Multimodal models, which are not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "multimodal models are not supported; use GPTModel for text"
decoder_model_with_local_default_spec = unsupported(_MESSAGE)
decoder_model_with_transformer_engine_default_spec = unsupported(_MESSAGE)
