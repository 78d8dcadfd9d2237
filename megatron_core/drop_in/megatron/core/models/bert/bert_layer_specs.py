"""BERT, which is not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "BERT is not supported; use GPTModel"
bert_layer_local_spec = unsupported(_MESSAGE)
bert_layer_with_transformer_engine_spec = unsupported(_MESSAGE)
