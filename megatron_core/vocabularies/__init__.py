"""Tokenizers that read a published vocabulary, each with the library of its format; nothing here imports torch."""

from megatron_core.config.data import TokenizerKind
from megatron_core.feature import Feature

FEATURES = (
    Feature(
        name="vocabularies",
        is_used=lambda config: config.data.tokenizer not in (None, "ByteLevelTokenizer", "NullTokenizer"),
        tokenizers=tuple(
            TokenizerKind(name, f"megatron_core.vocabularies.{make}", *settings)
            for name, make, *settings in (
                ("GPT2BPETokenizer", "hugging_face:GPT2BPETokenizer", ("vocab_file", "merge_file")),
                ("GPTSentencePieceTokenizer", "sentence_piece:SentencePieceTokenizer", ("tokenizer_model",)),
                ("HuggingFaceTokenizer", "hugging_face:HuggingFaceTokenizer", ("tokenizer_model",)),
                ("Llama2Tokenizer", "sentence_piece:llama2_tokenizer", ("tokenizer_model",)),
                ("SentencePieceTokenizer", "sentence_piece:SentencePieceTokenizer", ("tokenizer_model",)),
                (
                    *("TikTokenizer", "tik_token:TikTokenizer", ("tokenizer_model",)),
                    ("tiktoken_pattern", "tiktoken_num_special_tokens", "vocab_size"),
                ),
            )
        ),
    ),
)
