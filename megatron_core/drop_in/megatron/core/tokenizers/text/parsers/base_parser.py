"""The base of parsers of generated text."""

from typing import Any


class BaseParser:
    """Separates the content of a text from other information in it."""

    @staticmethod
    def parse(text: str, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        """Return (content, information by name); here all is content."""
        return text, {}
