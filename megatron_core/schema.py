"""Declarative checks of values read from JSON: types and ranges, once per kind of record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST_WHOLE = 2**53
"""Largest integer that every JSON reader preserves."""


def whole(low: int = 0, high: int = LARGEST_WHOLE) -> Check:
    """An integer from ``low`` to ``high``."""
    return lambda value: type(value) is int and low <= value <= high


def real(low: float = 0.0, high: float = 1e24) -> Check:
    """A number from ``low`` to ``high``, not NaN."""
    return lambda value: type(value) in (int, float) and low <= value <= high


def any_real(value: Any) -> bool:
    """A number, which may be NaN or infinite; finite ones in the range of float32."""
    return type(value) in (int, float) and (value != value or abs(value) in (math.inf, min(abs(value), 1e39)))


def text(value: Any) -> bool:
    """A string of moderate length."""
    return isinstance(value, str) and len(value) <= 10_000


def flag(value: Any) -> bool:
    """A Boolean."""
    return isinstance(value, bool)


def maybe(check: Check) -> Check:
    """Null, or a value that ``check`` accepts."""
    return lambda value: value is None or check(value)


def items(check: Check) -> Check:
    """A non-empty list of values that ``check`` accepts."""
    return lambda value: isinstance(value, list) and bool(value) and all(map(check, value))


def mapping(check: Check) -> Check:
    """An object whose values ``check`` accepts."""
    return lambda value: isinstance(value, dict) and all(map(text, value)) and all(map(check, value.values()))


def table(fields: Mapping[str, Check]) -> Check:
    """An object with exactly ``fields``."""
    return lambda value: isinstance(value, dict) and set(value) == set(fields) and not wrong(value, fields)


def wrong(
    record: Mapping[str, Any], fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None
) -> list[str]:
    """Names of ``fields`` that are missing, and of ``fields`` and ``optional`` with invalid values."""
    found = [name for name, check in fields.items() if name not in record or not check(record[name])]
    return found + [name for name, check in (optional or {}).items() if name in record and not check(record[name])]
