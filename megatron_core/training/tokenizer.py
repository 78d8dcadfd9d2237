"""For Megatron-LM's users: the tokenizer of its arguments, under its former path."""

from megatron_core.tokenizers.utils.build_tokenizer import build_tokenizer as build_tokenizer
