"""Reasoning that becomes the content if there is no other."""

from typing import Any

from megatron.core.tokenizers.text.parsers.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser


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
