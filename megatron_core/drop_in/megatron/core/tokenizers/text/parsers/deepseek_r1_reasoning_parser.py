"""Reasoning between <think> and </think>."""

from typing import Any

from megatron.core.tokenizers.text.parsers.base_parser import BaseParser


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
