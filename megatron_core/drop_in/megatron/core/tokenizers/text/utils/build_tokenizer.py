"""The former path of ``tokenizers.utils.build_tokenizer``."""

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer, vocab_size_with_padding
