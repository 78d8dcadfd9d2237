"""Records of a diagnosis: causes of lost time, with evidence and proposed changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_core.planner.explain import flag_of


@dataclass(frozen=True)
class Change:
    """A proposed change, and the share of a step's time that it is predicted to save."""

    text: str
    gain: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    """New values of settings; empty if the change is not a setting, for example hardware."""

    def __str__(self) -> str:
        """The text, with the predicted gain if there is one."""
        return f"{self.text} (predicted gain {self.gain:.1%})" if self.gain else self.text


@dataclass(frozen=True)
class Finding:
    """One cause of lost time."""

    cause: str
    share: float
    evidence: str
    changes: tuple[Change, ...]


def flags(text: str, gain: float, **settings: Any) -> Change:
    """Create a change of settings; its text ends with the flags."""
    words = (word for setting in settings.items() for word in flag_of(*setting))
    return Change(f"{text}: {' '.join(words)}", gain, settings)


@dataclass(frozen=True)
class Diagnosis:
    """All causes, the largest share first."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return lines for a terminal."""
        lines = [f"note: {note}" for note in self.notes]
        for number, finding in enumerate(self.findings, 1):
            lines.append(f"{number}. {finding.cause}: {finding.share:.1%} of the time. {finding.evidence}")
            lines += [f"   - {change}" for change in finding.changes]
        return "\n".join(lines)
