"""Multimodal models, which are not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "multimodal models are not supported; use GPTModel for text"
get_padding = unsupported(_MESSAGE)
get_packed_seq_params = unsupported(_MESSAGE)
