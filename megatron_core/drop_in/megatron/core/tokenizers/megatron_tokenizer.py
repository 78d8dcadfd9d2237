"""Tokenizers from a folder, a file or metadata."""

import json
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from megatron_core.errors import ConfigError, quoted
from megatron_core.foreign_json import STRING, read_object
from megatron_core.tokenizers.build import build_tokenizer

_TYPES = {
    "null-text": "NullTokenizer",
    "null": "NullTokenizer",
    "byte-level": "ByteLevelTokenizer",
    "huggingface": "HuggingFaceTokenizer",
    "sentencepiece": "SentencePieceTokenizer",
    "tiktoken": "TikTokenizer",
}
LIBRARIES = {kind: library for library, kind in reversed(_TYPES.items())}
"""The library of each tokenizer type; that of others is ``megatron``."""
_FLAGS = ("vocab_file", "merge_file", "vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens")
METADATA = "tokenizer_metadata.json"
TYPES = {"library": STRING, "chat_template": STRING}


class MegatronTokenizer:
    """Builds the engine's tokenizers from Megatron's ``metadata``; ``library`` selects the kind."""

    def __init__(self) -> None:
        raise ConfigError("MegatronTokenizer has no instances; use MegatronTokenizer.from_pretrained")

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None, metadata_path: str | dict[str, Any] | None = None, **kwargs: Any
    ) -> MegatronTokenizerText:
        """Return the tokenizer of a path.

        ``metadata_path`` is a dict, a JSON file, or None for the file next to the path. ``vocab_size`` applies to
        ``null-text``; for the library ``megatron`` the path is a value of ``--tokenizer-type``. Raises ConfigError for
        an unsupported library or argument.
        """
        metadata = metadata_path
        if metadata is None and tokenizer_path is not None:
            home = Path(tokenizer_path)
            metadata = str((home if home.is_dir() else home.parent) / METADATA)
        if not isinstance(metadata, dict):
            if metadata is None or not Path(metadata).is_file():
                raise ConfigError(f"no metadata at {metadata}; pass metadata_path={{'library': ...}}")
            metadata = read_object(Path(metadata), ConfigError, "write it with write_metadata", TYPES)
        library = metadata.get("library")
        if library not in _TYPES and library != "megatron":
            raise ConfigError(f"the tokenizer library {quoted(library)} is not supported; legal: {', '.join(_TYPES)}")
        if library == "megatron":  # the path is a value of --tokenizer-type
            kind, path = tokenizer_path or "GPT2BPETokenizer", kwargs.pop("tokenizer_model", None)
            kwargs |= {"merge_file": kwargs.pop("merges_file", None)} if "merges_file" in kwargs else {}
        else:
            kind, path = _TYPES[library], tokenizer_path
        template = metadata.get("chat_template") or kwargs.pop("chat_template", None)
        if wrong := [name for name in kwargs if name not in _FLAGS]:
            raise ConfigError(
                f"MegatronTokenizer.from_pretrained: {', '.join(wrong)} is not supported; store special tokens in the "
                "tokenizer's files, and leave the argument out"
            )
        engine = build_tokenizer(kind, path, **kwargs)
        return MegatronTokenizerText(engine, library, tokenizer_path, template)

    @staticmethod
    def write_metadata(
        tokenizer_path: str,
        tokenizer_library: str,
        tokenizer_class: type = MegatronTokenizerText,
        chat_template: str | None = None,
        overwrite: bool = False,
        metadata_path: str | None = None,
    ) -> None:
        """Write the library of a tokenizer, its class and its template to a file next to it, as Megatron Core does.

        ``from_pretrained`` does not read the class. Raises ConfigError if the file exists or the library is not
        supported.
        """
        if tokenizer_library not in _TYPES:
            raise ConfigError(f"the library {tokenizer_library!r} is not supported; legal: {', '.join(_TYPES)}")
        path = Path(tokenizer_path)
        target = Path(metadata_path) if metadata_path else (path if path.is_dir() else path.parent) / METADATA
        if target.exists() and not overwrite:
            raise ConfigError(f"{target} already exists; pass overwrite=True to replace it")
        names = {"class_name": tokenizer_class.__name__, "class_path": tokenizer_class.__module__}
        target.write_text(json.dumps({"library": tokenizer_library} | names | {"chat_template": chat_template}))
