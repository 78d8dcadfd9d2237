"""What a diagnosis finds: causes, with evidence and changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_core.planner.explain import flag_of


@dataclass(frozen=True)
class Change:
    """What to change, and the share of a step's time that it is predicted to save."""

    text: str
    gain: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings with new values; none for what no setting changes, as hardware."""

    def __str__(self) -> str:
        """The text, with the gain where one is predicted."""
        return f"{self.text} (predicted gain {self.gain:.1%})" if self.gain else self.text


@dataclass(frozen=True)
class Finding:
    """One cause."""

    cause: str
    share: float
    evidence: str
    changes: tuple[Change, ...]


def flags(text: str, gain: float, **settings: Any) -> Change:
    """A change whose text ends with its flags."""
    words = (word for setting in settings.items() for word in flag_of(*setting))
    return Change(f"{text}: {' '.join(words)}", gain, settings)
