"""Builds a tokenizer from Megatron's arguments, and pads the vocabulary."""

from dataclasses import fields
from typing import Any

from megatron.core.mirror import default_of, mirror, refuse_changes
from megatron.core.tokenizers.megatron_tokenizer import LIBRARIES
from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from megatron_core.errors import ConfigError
from megatron_core.features.megatron_flags.tables import SAME_VALUE
from megatron_core.tokenizers import build_tokenizer as build
from megatron_core.tokenizers import tokenizer_kinds

_Settings: Any = mirror("TokenizerConfig", kw_only=True)
_READ = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens")


def build_tokenizer(args: Any, **kwargs: Any) -> MegatronTokenizerText:
    """Return the tokenizer of ``args.tokenizer_type`` and the attributes that it needs, as in ``TokenizerConfig``.

    If ``args.padded_vocab_size`` is missing, it is set by ``vocab_size_with_padding``. Raises ConfigError for
    unsupported settings.
    """
    kind = SAME_VALUE["tokenizer_type"].get(args.tokenizer_type, args.tokenizer_type)
    if kind not in tokenizer_kinds():
        raise ConfigError(
            f"tokenizer_type {args.tokenizer_type} is not supported; legal: {', '.join(tokenizer_kinds())}"
        )
    config = _Settings(**{item.name: getattr(args, item.name, default_of(item)) for item in fields(_Settings)})
    refuse_changes(config)
    given = {name: getattr(config, name) for name in _READ}
    tokenizer = build(kind, **{name: value for name, value in given.items() if value is not None})
    if getattr(args, "padded_vocab_size", None) is None:
        args.padded_vocab_size = vocab_size_with_padding(tokenizer.vocab_size, args)
    library = LIBRARIES.get(kind, "megatron")
    return MegatronTokenizerText(tokenizer, library, config.tokenizer_model, config.chat_template)


def vocab_size_with_padding(orig_vocab_size: int, args: Any, logging_enabled: bool = True) -> int:
    """Return the size rounded up to a multiple of make_vocab_size_divisible_by x tensor_model_parallel_size.

    With ``args.pad_vocab_size=False`` return the size unchanged.
    """
    if not getattr(args, "pad_vocab_size", True):
        return orig_vocab_size
    unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-orig_vocab_size // unit) * unit
