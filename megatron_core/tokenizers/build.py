"""Build the tokenizer that Megatron's flags (`--tokenizer-type`, `--tokenizer-model` ...) describe."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_core.config import DataConfig, RunConfig
from megatron_core.config.data import TokenizerKind
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.feature import features, load_hook
from megatron_core.tokenizers.base import Tokenizer

NUM_SPECIAL_TOKENS = 1000
"""Default of ``--tiktoken-num-special-tokens``."""

_CORE = (
    TokenizerKind("ByteLevelTokenizer", "megatron_core.tokenizers.built_in:ByteLevelTokenizer"),
    TokenizerKind("NullTokenizer", "megatron_core.tokenizers.built_in:NullTokenizer", ("vocab_size",)),
)


def tokenizer_kinds() -> dict[str, TokenizerKind]:
    """The legal values of `--tokenizer-type`: those of the core and of features."""
    rows = [*_CORE, *(row for feature in features() for row in feature.tokenizers)]
    return {row.name: row for row in sorted(rows, key=lambda row: row.name)}


@dataclass(frozen=True)
class TokenizerFiles:
    """Megatron's flags that describe a tokenizer."""

    tokenizer_type: str
    tokenizer_model: str | Path | None = None
    vocab_file: str | Path | None = None
    merge_file: str | Path | None = None
    vocab_size: int | None = None
    """The vocabulary size of NullTokenizer, the upper bound of TikTokenizer's; for other types that of the model, which
    must not be smaller than the tokenizer's."""
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = NUM_SPECIAL_TOKENS

    @classmethod
    def of(cls, tokenizer_type: str, settings: object) -> "TokenizerFiles":
        """Take the flags from the attributes of ``settings``."""
        _, *names = (field.name for field in fields(cls))
        return cls(tokenizer_type, **{name: getattr(settings, name) for name in names})

    def load(self) -> Tokenizer:
        """Build the tokenizer.

        ConfigError: the type is unknown, a required setting is missing, a file is missing or not readable, or
        `vocab_size` is smaller than the tokenizer's.
        """
        kinds = tokenizer_kinds()
        row = kinds.get(self.tokenizer_type)
        if row is None:
            known = ", ".join(kinds)
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} is not supported; supported: {known}")
        missing = [f"--{name.replace('_', '-')}" for name in row.needs if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs {' and '.join(missing)}")
        tokenizer: Tokenizer = load_hook(row.make)(*(getattr(self, name) for name in row.needs + row.takes))
        if self.vocab_size is not None and self.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"--vocab-size {self.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} tokens; "
                f"remove it, or give {tokenizer.vocab_size} or more"
            )
        return tokenizer


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | Path | None = None, **flags: Any) -> Tokenizer:
    """Build a tokenizer from Megatron's flags; flags and errors as in ``TokenizerFiles``."""
    return TokenizerFiles(tokenizer_type, tokenizer_model, **flags).load()


def tokenizer_of(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of a configuration; None if it has none."""
    return None if data.tokenizer is None else TokenizerFiles.of(data.tokenizer, data).load()


ASSUMED_VOCABULARY = 50_257
"""Vocabulary size of predictions if the tokenizer's files are not on this machine."""


def vocabulary_size(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """The true size of the vocabulary, without padding: ``vocab_size`` if given, else the tokenizer's."""
    size = config.data.vocab_size or (tokenizer.vocab_size if tokenizer is not None else None)
    if size is None:
        raise ConfigError("the vocabulary's size is unknown; give --tokenizer-type or --vocab-size")
    return size


def vocabulary_or_assumed(config: RunConfig) -> int:
    """Size of the vocabulary; ``ASSUMED_VOCABULARY`` if the tokenizer's files are not on this machine."""
    if config.data.vocab_size is not None:
        return config.data.vocab_size
    try:
        return vocabulary_size(config, tokenizer_of(config.data))
    except MegatronError:
        return ASSUMED_VOCABULARY
