"""Builds a tokenizer from Megatron's arguments, and pads the vocabulary."""

from typing import Any

from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
from megatron_core.errors import ConfigError
from megatron_core.tokenizers import TOKENIZER_TYPES
from megatron_core.tokenizers import build_tokenizer as build

_READ = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens")


def build_tokenizer(args: Any, **kwargs: Any) -> MegatronTokenizerText:
    """Return the tokenizer of ``args.tokenizer_type`` and the attributes that it needs.

    If ``args.padded_vocab_size`` is missing, it is set by ``vocab_size_with_padding``.
    """
    if args.tokenizer_type not in TOKENIZER_TYPES:
        raise ConfigError(f"tokenizer_type {args.tokenizer_type} is not supported; legal: {', '.join(TOKENIZER_TYPES)}")
    given = {name: getattr(args, name, None) for name in _READ}
    tokenizer = build(args.tokenizer_type, **{name: value for name, value in given.items() if value is not None})
    if getattr(args, "padded_vocab_size", None) is None:
        args.padded_vocab_size = vocab_size_with_padding(tokenizer.vocab_size, args)
    return MegatronTokenizerText(tokenizer, args.tokenizer_type, given.get("tokenizer_model"))


def vocab_size_with_padding(orig_vocab_size: int, args: Any, logging_enabled: bool = True) -> int:
    """Return the size rounded up to a multiple of make_vocab_size_divisible_by x tensor_model_parallel_size.

    With ``args.pad_vocab_size=False`` return the size unchanged.
    """
    if not getattr(args, "pad_vocab_size", True):
        return orig_vocab_size
    unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-orig_vocab_size // unit) * unit
