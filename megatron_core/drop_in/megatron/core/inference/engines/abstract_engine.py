"""Base class of engines."""

from abc import ABC, abstractmethod
from typing import Any


class AbstractEngine(ABC):
    """Generates for prompts."""

    @abstractmethod
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of prompts."""
