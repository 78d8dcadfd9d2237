"""Parsers of generated text, by Megatron's names."""

from typing import Any

from megatron_core.drop_in.unsupported import unsupported


class BaseParser:
    """Separates the content of a text from other information in it."""

    @staticmethod
    def parse(text: str, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        """Return (content, information by name); here all is content."""
        return text, {}


class DeepSeekR1ReasoningParser(BaseParser):
    """The text up to </think> is reasoning; without the mark all of it."""

    @staticmethod
    def parse(text: str, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        """Return (the text after the first </think>, {"reasoning": the text before it} unless that is empty).

        Reasoning begins after the first <think>, if there is one.
        """
        inside = text.split("<think>", 1)[-1]
        reasoning, _, content = inside.partition("</think>")
        return content, {"reasoning": reasoning} if reasoning else {}


class NemotronV3ReasoningParser(DeepSeekR1ReasoningParser):
    """``DeepSeekR1ReasoningParser`` with reasoning as content if a request asks for it."""

    @staticmethod
    def parse(text: str, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        """Return the base class's result; reasoning takes the place of empty content on two conditions.

        ``chat_template_kwargs`` has ``enable_thinking=False`` or ``force_nonempty_content=True``.
        """
        content, found = DeepSeekR1ReasoningParser.parse(text)
        settings = kwargs.get("chat_template_kwargs") or {}
        wanted = settings.get("enable_thinking") is False or settings.get("force_nonempty_content") is True
        return (found["reasoning"], {}) if wanted and not content and found else (content, found)


class Qwen3CoderToolParser(BaseParser):
    """A parser of calls of tools."""

    parse = staticmethod(unsupported("Qwen3CoderToolParser is not supported; parse calls of tools in your program"))


PARSER_MAPPING = {
    "deepseek-r1-reasoning": DeepSeekR1ReasoningParser,
    "nemotron-v3-reasoning": NemotronV3ReasoningParser,
    "qwen3-coder-tool": Qwen3CoderToolParser,
}
