"""T5, which is not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "T5 is not supported; use GPTModel"
get_t5_encoder_with_local_block_spec = unsupported(_MESSAGE)
get_t5_encoder_with_transformer_engine_block_spec = unsupported(_MESSAGE)
get_t5_decoder_with_local_block_spec = unsupported(_MESSAGE)
get_t5_decoder_with_transformer_engine_block_spec = unsupported(_MESSAGE)
