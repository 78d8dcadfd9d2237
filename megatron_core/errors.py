"""The exceptions this package raises on purpose; each message says what to change.

They are also of the built-in kinds that users of Megatron Core catch, whose checks are assertions for the most part.
"""

import re

MOST_SHOWN = 200
"""Longest value that a message quotes."""
LONGEST_WORD, LONGEST_LINE, LONGEST_MESSAGE = 300, 2_000, 20_000


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal executes or that reorder its text, except newline and tab."""


def escaped(found: re.Match[str]) -> str:
    r"""A control character as it stands in a Python string, such as ``\x1b``."""
    return ascii(found[0])[1:-1]


def visible(text: str) -> str:
    """``text`` with control characters other than newline and tab escaped."""
    return CONTROL.sub(escaped, text)


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """``text`` for a message: of a long one the beginning, and how long it is."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not blank, or the error's type, for a message."""
    lines = (line.strip() for line in str(error).splitlines())
    return shortened(next(filter(None, lines), type(error).__name__)).rstrip(".")


def _middle_left_out(text: str, most: int) -> str:
    """A long ``text`` without its middle: the setting stands at its beginning, and the way out at its end."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"


class MegatronError(Exception):
    """Base of every error the package raises on purpose; its message shortens values that are too long to read,
    and escapes control characters."""

    def __str__(self) -> str:
        """The message, whatever values of a user it was made from."""
        text = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda found: shortened(found[0]), visible(super().__str__()))
        lines = (_middle_left_out(line, LONGEST_LINE) for line in text.split("\n"))
        return _middle_left_out("\n".join(lines), LONGEST_MESSAGE)


class ConfigError(MegatronError, ValueError, AssertionError):
    """A setting, or a combination of settings, cannot be honoured."""


class DataError(MegatronError, ValueError, AssertionError):
    """A data set, a tokenizer's output or an input file is not what the run needs."""


class CheckpointError(MegatronError, RuntimeError):
    """A checkpoint cannot be written, or what is stored does not fit the run that reads it."""


class LayoutError(MegatronError, RuntimeError, ValueError, AssertionError):
    """The ranks of a job cannot be arranged into the parallel layout that was asked for."""
