"""The tokenizer of its arguments, under its former path."""

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
