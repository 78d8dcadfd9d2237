"""Tokenizers behind one small protocol; nothing in this package imports torch."""

from megatron_core.tokenizers.base import Tokenizer, padding_id
from megatron_core.tokenizers.build import TOKENIZER_TYPES, build_tokenizer, tokenizer_of
from megatron_core.tokenizers.byte_level import ByteLevelTokenizer
from megatron_core.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megatron_core.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_core.tokenizers.null import NullTokenizer
from megatron_core.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron_core.tokenizers.tik_token import TikTokenizer

__all__ = [
    "TOKENIZER_TYPES",
    "ByteLevelTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "padding_id",
    "tokenizer_of",
]
