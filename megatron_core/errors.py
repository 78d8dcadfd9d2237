"""The exceptions that this package raises; each message contains the fix.

They also inherit from the built-in exceptions that users of Megatron Core catch, mostly AssertionError.
"""

import re
from collections.abc import Sequence

MOST_SHOWN = 200
"""Maximum length of a value in a message."""
LONGEST_WORD, LONGEST_LINE, LONGEST_MESSAGE = 300, 2_000, 20_000


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal executes or that reorder its text, except newline and tab."""


def escaped(found: re.Match[str]) -> str:
    r"""Escape a control character as in a Python string, such as ``\x1b``."""
    return ascii(found[0])[1:-1]


def visible(text: str) -> str:
    """``text`` with control characters other than newline and tab escaped."""
    return CONTROL.sub(escaped, text)


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """Shorten ``text`` for a message: its beginning and its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def first_line(error: BaseException) -> str:
    """The first non-blank line of an error's message, or the error's type."""
    lines = (line.strip() for line in str(error).splitlines())
    return shortened(next(filter(None, lines), type(error).__name__)).rstrip(".")


def _middle_left_out(text: str, most: int) -> str:
    """A long ``text`` without its middle: the setting is at the beginning of a message, and the fix at its end."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"


class MegatronError(Exception):
    """Base of the package's errors; its message shortens long values and escapes control characters."""

    def __str__(self) -> str:
        """The message, safe to print for any values."""
        text = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda found: shortened(found[0]), visible(super().__str__()))
        lines = (_middle_left_out(line, LONGEST_LINE) for line in text.split("\n"))
        return _middle_left_out("\n".join(lines), LONGEST_MESSAGE)


class ConfigError(MegatronError, ValueError, AssertionError):
    """A setting, or a combination of settings, is not supported."""


class DataError(MegatronError, ValueError, AssertionError):
    """A data set, a tokenizer's output or an input file is invalid."""


class CheckpointError(MegatronError, RuntimeError):
    """A checkpoint cannot be written, or does not match the run that reads it."""


class WrongStepError(MegatronError):
    """Wrong values arrived or were computed; the state before step ``first`` is right, or no known one if it is 0."""

    def __init__(self, message: str, first: int, ranks: Sequence[int] = ()) -> None:
        """``ranks``: launcher ranks that must not continue."""
        super().__init__(message)
        self.first, self.ranks = first, tuple(ranks)


class LayoutError(MegatronError, RuntimeError, ValueError, AssertionError):
    """The ranks of a job do not fit the requested parallel layout."""


class RestartNeeded(MegatronError):
    """This attempt has ended and saved; the launcher must start the next one with the remaining ranks."""
