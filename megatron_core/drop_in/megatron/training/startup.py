"""Times at which the program started."""

from typing import Any


def set_startup_timestamps(program_start: float | None = None, main_entry: float | None = None, **others: Any) -> None:
    """Do nothing: the duration of imports is not part of this package's report."""
