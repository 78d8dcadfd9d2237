"""Rewards that a program can verify."""

import re
from fractions import Fraction

# A minus after a digit is a difference, not a sign.
NUMBER = re.compile(r"(?:(?<![\w.])[-+])?(?<![0-9])[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")


def last_number(text: str) -> Fraction | None:
    """The last number of a text, such as -3, 1,234, 0.50 or 1/2; None if there is none."""
    for match in reversed(NUMBER.findall(text)):
        try:
            return Fraction(match.replace(",", ""))
        except (ValueError, ZeroDivisionError):  # 1.5/2, 1/0, and more digits than Python converts
            continue
    return None


def number_reward(text: str, expected: int | str | Fraction) -> float:
    """1.0 if the last number of ``text`` is exactly ``expected``, else 0.0."""
    return float(last_number(text) == Fraction(expected))


def format_reward(text: str, pattern: str) -> float:
    """1.0 if the regular expression ``pattern`` matches the whole ``text``, in which a dot is any character."""
    return float(re.fullmatch(pattern, text, flags=re.DOTALL) is not None)
