"""The tokenizer of the arguments, at its former path."""

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
