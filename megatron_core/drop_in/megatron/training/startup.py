"""The times at which the program started."""

from typing import Any


def set_startup_timestamps(program_start: float | None = None, main_entry: float | None = None, **others: Any) -> None:
    """Do nothing: the report does not include the duration of imports."""
