"""Sentences and arithmetic that several rules share. Rules import this module, and no rule imports another one."""

from collections.abc import Iterator
from math import isqrt


def divisors(number: int) -> list[int]:
    """All divisors in ascending order. Above 10^12, only divisors up to 10^6 and their quotients are found, so that a
    mistyped number does not take hours."""
    small = [d for d in range(1, min(isqrt(max(number, 0)), 10**6) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def leaves_rest(number: int, divisor: int) -> bool:
    """Whether ``number / divisor`` has a remainder; False for sizes below 1, which another rule reports."""
    return number >= 1 and divisor >= 1 and number % divisor != 0


def uneven(name: str, number: int, over: str, size: int, way_out: str = "") -> Iterator[str]:
    """The message for a size that does not split evenly."""
    if leaves_rest(number, size):
        legal = ", ".join(map(str, divisors(number)))
        yield f"{name}={number} cannot be split over {over}={size}; legal: {legal}{way_out}"


def nearest_multiples(number: int, unit: int) -> str:
    """The multiples of ``unit`` next to ``number``, as ``510, 513``."""
    below = number // unit * unit
    return ", ".join(str(multiple) for multiple in (below, below + unit) if multiple)


def unused(setting: str, value: object, other: str, is_now: object, remedy: str) -> str:
    """The message for a setting that has no effect with the value of another one."""
    return f"{setting}={value} has no effect with {other}={is_now}; {remedy}"


def exclusive(*assigned: str) -> str:
    """The message for settings, each with its value, of which only one may be given."""
    return f"{' and '.join(assigned)} exclude one another; keep one of them"


def shown(value: object) -> str:
    """A value as on the command line."""
    return " ".join(value) if isinstance(value, tuple) and all(isinstance(item, str) for item in value) else str(value)
