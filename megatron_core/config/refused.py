"""Fields of Megatron's configurations that are there for its users, and have to keep their defaults."""

from dataclasses import field, fields
from typing import Any

from megatron_core.errors import ConfigError


def refused(default: Any) -> Any:
    """Such a field of a dataclass."""
    return field(default=default, metadata={"refused": True})


def refuse_changes(settings: Any) -> None:
    """``ConfigError`` with all fields of ``refused`` that have other values."""
    kept = [item for item in fields(settings) if "refused" in item.metadata]
    wrong = [item.name for item in kept if getattr(settings, item.name) != item.default]
    if wrong:
        raise ConfigError(f"{type(settings).__name__}: {', '.join(wrong)} is not supported; leave it out")
