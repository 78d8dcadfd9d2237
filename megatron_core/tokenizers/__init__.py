"""Tokenizers with one small protocol; this package does not import torch."""

from megatron_core.tokenizers.base import Tokenizer, dropped_bytes, end_ids
from megatron_core.tokenizers.build import TOKENIZER_TYPES, build_tokenizer, tokenizer_of
from megatron_core.tokenizers.built_in import ByteLevelTokenizer, NullTokenizer
from megatron_core.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_core.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron_core.tokenizers.tik_token import TikTokenizer
