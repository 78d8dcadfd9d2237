"""Tokenizers from a folder, a file or a description."""

import json
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.tokenizers.build import build_tokenizer

_TYPES = {
    "null-text": "NullTokenizer",
    "null": "NullTokenizer",
    "byte-level": "ByteLevelTokenizer",
    "huggingface": "HuggingFaceTokenizer",
    "sentencepiece": "SentencePieceTokenizer",
    "tiktoken": "TikTokenizer",
}
METADATA = "tokenizer_metadata.json"


class MegatronTokenizer:
    """Makes the tokenizers of this package from Megatron's ``metadata``, whose ``library`` says which one it is."""

    def __init__(self) -> None:
        raise ConfigError("MegatronTokenizer has no instances; use MegatronTokenizer.from_pretrained")

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None, metadata_path: str | dict[str, Any] | None = None, **kwargs: Any
    ) -> Tokenizer:
        """The tokenizer of a path; ``metadata_path`` is a dict, a JSON file, or None for the one beside the path.

        ``vocab_size`` is that of ``null-text``. ConfigError for a library that is not supported.
        """
        metadata = metadata_path
        if metadata is None and tokenizer_path is not None:
            path = Path(tokenizer_path)
            metadata = str((path if path.is_dir() else path.parent) / METADATA)
        if not isinstance(metadata, dict):
            if metadata is None or not Path(metadata).is_file():
                raise ConfigError(f"no metadata at {metadata}; pass metadata_path={{'library': ...}}")
            metadata = json.loads(Path(metadata).read_text())
        library = metadata.get("library")
        if library not in _TYPES:
            raise ConfigError(f"the tokenizer library {library!r} is not supported; legal: {', '.join(_TYPES)}")
        return build_tokenizer(_TYPES[library], tokenizer_path, **kwargs)

    @staticmethod
    def write_metadata(
        tokenizer_path: str, tokenizer_library: str, overwrite: bool = False, metadata_path: str | None = None
    ) -> None:
        """Write which library a tokenizer is for, beside it; ValueError for one that is there, or is not supported."""
        if tokenizer_library not in _TYPES:
            raise ConfigError(f"the library {tokenizer_library!r} is not supported; legal: {', '.join(_TYPES)}")
        path = Path(tokenizer_path)
        target = Path(metadata_path) if metadata_path else (path if path.is_dir() else path.parent) / METADATA
        if target.exists() and not overwrite:
            raise ConfigError(f"{target} is there already; pass overwrite=True to replace it")
        target.write_text(json.dumps({"library": tokenizer_library}))
