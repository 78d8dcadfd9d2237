"""Where the tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token files, splits and the tokenizer."""

    seq_length: int = 64
    """Tokens in a training sequence."""
    data_path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx files, or a blend: weight prefix weight prefix ..."""
    train_data_path: tuple[str, ...] = ()
    """As data_path, for training alone; excludes data_path and split."""
    valid_data_path: tuple[str, ...] = ()
    """As data_path, for validation alone."""
    test_data_path: tuple[str, ...] = ()
    """As data_path, for the test split alone."""
    split: str | None = None
    """Shares of train, validation and test in data_path; default 969,30,1."""
    mock_data: bool = False
    """Train on made-up sequences instead of files; needs --vocab-size."""
    eod_mask_loss: bool = False
    """No loss where the input token is the end of a document."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer."""
    tokenizer_model: str | None = None
    """File or folder of the tokenizer."""
    vocab_file: str | None = None
    """Vocabulary file of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges file of GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Vocabulary size where no tokenizer tells it (NullTokenizer, --mock-data, or data alone)."""
