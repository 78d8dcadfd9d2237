"""The exceptions that this package raises; each message contains the fix.

They also inherit from the built-in exceptions that users of Megatron Core catch, mostly AssertionError.
"""

import re
import textwrap
from collections.abc import Mapping
from enum import Enum
from itertools import islice
from pathlib import PurePath
from typing import Any

MOST_SHOWN = 200
"""Maximum length of a value in a message."""
LONGEST_INTEGER = 4096
"""Maximum number of bits of an integer in a message; Python does not print those of more than 4,300 digits."""
MOST_ITEMS = 8
MOST_LEVELS = 4
"""Maximum number of elements of a container, and of nested containers, in a message."""
BRACKETS: dict[type, str] = {Mapping: "{}", list: "[]", tuple: "()", set: "{}", frozenset: "{}"}
LONGEST_WORD = 300
LONGEST_LINE = 2_000
LONGEST_MESSAGE = 20_000


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal executes or that reorder its text, except newline and tab."""


def escaped(match: re.Match[str]) -> str:
    r"""Escape a control character as in a Python string, such as ``\x1b``."""
    return ascii(match[0])[1:-1]


def visible(text: str) -> str:
    """``text`` with control characters other than newline and tab escaped."""
    return CONTROL.sub(escaped, text)


def wrapped(text: str) -> str:
    """``text`` on lines of at most 100 columns for a console, without breaks inside words."""
    return textwrap.fill(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """Shorten ``text`` for a message: its beginning and its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def quoted(value: object) -> str:
    """The beginning of a value of a file or another program, for a message.

    The work is bounded: a pickle of a few hundred bytes can hold a list of 2^45 elements, each list containing the next
    one twice. Subclasses of containers are shown as these, other objects by their class.
    """
    text = _beginning(value, MOST_LEVELS)
    return shortened(text) if isinstance(value, tuple(BRACKETS)) else text


def _beginning(value: Any, levels: int) -> str:
    """``repr`` of the first ``MOST_ITEMS`` elements of each container, ``levels`` levels deep."""
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
        return f"an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, int | float | complex | str | bytes | bytearray | Enum | PurePath | type):
        return shortened(repr(value))
    container = next((container for container in BRACKETS if isinstance(value, container)), None)
    if container is None:
        return f"<{type(value).__name__}>"
    opening = BRACKETS[container][0]
    closing = BRACKETS[container][1]
    if levels == 0:
        return f"{opening}...{closing}" if value else f"{opening}{closing}"
    # In the container's order: sorting would compare elements.
    if isinstance(value, Mapping):
        pairs = islice(value.items(), MOST_ITEMS)
        items = [f"{_beginning(key, levels - 1)}: {_beginning(item, levels - 1)}" for key, item in pairs]
    else:
        items = [_beginning(item, levels - 1) for item in islice(value, MOST_ITEMS)]
    more = ["..."] if len(value) > MOST_ITEMS else []
    return f"{opening}{', '.join(items + more)}{closing}"


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
        text = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda match: shortened(match[0]), visible(super().__str__()))
        lines = (_middle_left_out(line, LONGEST_LINE) for line in text.split("\n"))
        return _middle_left_out("\n".join(lines), LONGEST_MESSAGE)


class ConfigError(MegatronError, ValueError, AssertionError):
    """A setting, or a combination of settings, is not supported."""


class DataError(MegatronError, ValueError, AssertionError):
    """A data set, a tokenizer's output or an input file is invalid."""


class CheckpointError(MegatronError, RuntimeError):
    """A checkpoint cannot be written, or does not match the run that reads it."""


class LayoutError(MegatronError, RuntimeError, ValueError, AssertionError):
    """The ranks of a job do not fit the requested parallel layout."""


class RestartNeeded(MegatronError):
    """This attempt has ended and saved; the launcher must start the next one with the remaining ranks."""
