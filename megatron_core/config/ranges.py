"""Legal numbers, and names of files. None is always legal, NaN never."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Any


@dataclass(frozen=True)
class Range:
    """Legal values of a setting."""

    words: str
    """The range in words that follow "must be"."""
    contains: Callable[[Any], bool]
    """Whether a value is in the range."""
    fault: str = "is out of range"
    """The fault of a value outside the range, for messages."""


def integers(least: int, most: int | None = None) -> Range:
    """Integers from ``least`` to ``most``, or without an upper bound."""
    if most is None:
        return Range(f"an integer >= {least}", lambda x: x >= least)
    return Range(f"an integer from {least} to {most:,}", lambda x: least <= x <= most)


def above_0(most: float) -> Range:
    """Numbers above 0, up to ``most``."""
    return Range(f"a number > 0 and <= {most:,.7g}", lambda x: 0 < x <= most)


def from_0(most: float) -> Range:
    """Numbers from 0 to ``most``."""
    return Range(f"a number >= 0 and <= {most:,.7g}", lambda x: 0 <= x <= most)


def between(least: float, most: float) -> Range:
    """Numbers from ``least`` to ``most``."""
    return Range(f"a number from {least:g} to {most:,.7g}", lambda x: least <= x <= most)


def _is_date(text: str) -> bool:
    with suppress(ValueError):
        return len(text) == len("2024-07-26") and bool(date.fromisoformat(text))
    return False


COUNT, COUNT_FROM_0 = integers(1), integers(0)
SIZE = integers(1, 2**31 - 1)
# Far more than any model has: a list or loop of such a length would take very long before it fails.
SMALL_COUNT, SMALL_COUNT_FROM_0 = integers(1, 2**16), integers(0, 2**16)
# Up to the largest number of float32.
POSITIVE, NON_NEGATIVE = above_0(3e38), from_0(3e38)
BELOW_1 = Range("a number >= 0 and < 1", lambda x: 0 <= x < 1)
POSITIVE_UP_TO_1, UP_TO_1 = above_0(1), from_0(1)
# An empty name would be the current folder, or end in a traceback.
FOLDER = Range("a folder (. is the current one) or left out", bool, "names no folder")
DATE = Range("a date as YYYY-MM-DD", _is_date, "is not a date")
FILE = Range("a file or left out", bool, "names no file")
