"""Values of a shell script that are not known without running it."""

import re

_START = "\ue000"
_END = "\ue001"
UNKNOWN = re.compile(f"{_START}([^{_END}]*){_END}")
"""Place of a value that is not known without running the script; the group is its name."""


def unknown(name: str) -> str:
    """A value that is not known, with a name for messages."""
    return f"{_START}{re.sub(r'[^!-~]+', '-', name)[:60]}{_END}"


def readable(text: str) -> str:
    """``text`` with ``<name>`` for each unknown value."""
    return UNKNOWN.sub(r"<\1>", text)


def has_whole_unknowns(text: str) -> bool:
    """Whether no place of an unknown value in ``text`` was cut."""
    return not re.search(f"[{_START}{_END}]", UNKNOWN.sub("", text))
