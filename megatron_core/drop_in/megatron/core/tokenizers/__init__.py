"""Tokenizers with Megatron Core's names."""

from megatron.core.tokenizers.megatron_tokenizer import MegatronTokenizer
