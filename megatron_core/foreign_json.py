"""Declarative checks of values read from JSON: types and ranges, once per kind of record.

``Check`` functions describe records that this package writes; ``KeyType`` describes the keys of files of other
programs, whose errors say what a value must be.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_core.errors import MegatronError, quoted
from megatron_core.text_file import read_bytes

Check = Callable[[Any], bool]
LARGEST_WHOLE = 2**53
"""Largest integer that every JSON reader preserves."""


def whole(low: int = 0, high: int = LARGEST_WHOLE) -> Check:
    """An integer from ``low`` to ``high``."""
    return lambda value: type(value) is int and low <= value <= high


def numeric(low: float = 0.0, high: float = 1e24) -> Check:
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
    names = [name for name, check in fields.items() if name not in record or not check(record[name])]
    return names + [name for name, check in (optional or {}).items() if name in record and not check(record[name])]


LARGEST_JSON = 2**28
"""Maximum size in bytes of a JSON file of another program; an index or a tokenizer has up to 2**25."""


class KeyType(NamedTuple):
    """The legal values of a key in a JSON file of another program."""

    description: str
    """The values in words that follow "it must be"."""
    accepts: Check


def integer(least: int, most: int) -> KeyType:
    """An integer from ``least`` to ``most``; neither a number with a fraction of zero nor a Boolean."""
    return KeyType(f"an integer from {least:,} to {most:,}", whole(least, most))


def _number(value: Any) -> float:
    """``value`` as a float; NaN unless it is a number in the range of float32."""
    return float(value) if numeric(-3e38, 3e38)(value) else math.nan


# No model is larger than these bounds; without them, sizes in bytes overflow.
COUNT = integer(1, 2**16)
COUNT_OR_ZERO = integer(0, 2**16)
WIDTH = integer(1, 2**24)
LENGTH = integer(1, 2**31 - 1)
LENGTH_OR_ZERO = integer(0, 2**31 - 1)
POSITIVE = KeyType("a finite number above 0", lambda value: _number(value) > 0)
NUMBER = KeyType("a finite number >= 0", lambda value: _number(value) >= 0)
BELOW_1 = KeyType("a number >= 0 and < 1", lambda value: 0 <= _number(value) < 1)
SWITCH = KeyType("true or false", flag)
STRING = KeyType("a string", lambda value: isinstance(value, str))
FACTORS = KeyType(
    "a list of finite numbers above 0",
    lambda value: isinstance(value, list) and all(_number(item) > 0 for item in value),
)
STRINGS = KeyType(
    "a list of strings", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)
)
STRING_OR_STRINGS = KeyType(
    "a string or a list of strings", lambda value: isinstance(value, str) or STRINGS.accepts(value)
)
COUNTS = KeyType("a list of integers >= 0", lambda value: isinstance(value, list) and all(map(whole(), value)))
OBJECT = KeyType("an object", lambda value: isinstance(value, dict))


def wrong_values(
    content: Mapping[str, Any], types: Mapping[str, KeyType], inside: str = ""
) -> list[tuple[str, Any, KeyType]]:
    """Path, value and type of each key, in nested objects too, with a value that its type does not accept.

    null is accepted: the key then counts as absent. ``inside`` is the path of the enclosing object.
    """
    faults: list[tuple[str, Any, KeyType]] = []
    for key, value in content.items():
        if key in types and value is not None:
            if not types[key].accepts(value):
                faults.append((f"{inside}{key}", value, types[key]))
            elif types[key] is OBJECT:
                faults += wrong_values(value, types, f"{inside}{key}.")
    return faults


def read_object(
    path: Path, error: type[MegatronError], remedy: str, types: Mapping[str, KeyType] | None = None
) -> dict[str, Any]:
    """The object in a JSON file of another program, with values of the ``types`` of its keys.

    As in these programs, the last of several equal keys counts. Errors: ``error``, which ends with ``remedy``.
    """
    try:
        content = json.loads(read_bytes(path, LARGEST_JSON))
    except FileNotFoundError:
        raise error(f"{path}: no such file; {remedy}") from None
    except RecursionError:
        raise error(f"{path} cannot be read as JSON: it is nested too deeply; {remedy}") from None
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise error(f"{path} cannot be read as JSON: {reason}; {remedy}") from None
    if not isinstance(content, dict):
        raise error(f"{path} contains a {type(content).__name__}, not an object; {remedy}")
    for key, value, key_type in wrong_values(content, types or {}):
        raise error(f"{path} says {key}={quoted(value)}; it must be {key_type.description}; {remedy}")
    return content
