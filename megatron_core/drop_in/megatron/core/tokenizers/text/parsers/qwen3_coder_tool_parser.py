"""Calls of tools in Qwen3-Coder's format, which are not supported."""

from megatron.core.tokenizers.text.parsers.base_parser import BaseParser
from megatron_core.drop_in.unsupported import unsupported


class Qwen3CoderToolParser(BaseParser):
    """A parser of calls of tools."""

    parse = staticmethod(unsupported("Qwen3CoderToolParser is not supported; parse calls of tools in your program"))
