"""The size of the vocabulary of a configuration."""

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.tokenizers.build import tokenizer_of

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
