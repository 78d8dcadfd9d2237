"""Reading small files of text that a user names."""

import os
from pathlib import Path

LARGEST_TEXT = 2**24
"""Bytes of a file of settings, paths or prompts; a device may have no end."""


def read_text(path: str | Path) -> str:
    """The text of a file, or of a pipe such as ``<(command)``. OSError, or ValueError that says what is wrong with it:
    a named pipe (reading it would block until a process writes), more than ``LARGEST_TEXT`` bytes, or not UTF-8."""
    if Path(os.path.realpath(path)).is_fifo():  # that of <(command) has no name
        raise ValueError("it is a named pipe; give a file")
    with open(path, "rb") as file:
        data = file.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise ValueError(f"it has more than {LARGEST_TEXT} bytes")
    return data.decode()
