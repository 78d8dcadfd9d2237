"""The protocol of objects with their own dictionaries in a configuration."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Serializable(Protocol):
    """An object that can be written as a dictionary whose ``_target_`` names its class."""

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Serializable":
        """Return the object of a dictionary."""
