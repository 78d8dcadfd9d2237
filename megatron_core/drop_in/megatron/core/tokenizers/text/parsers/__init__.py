"""Parsers of generated text."""

from megatron.core.tokenizers.text.parsers.mapping import PARSER_MAPPING
