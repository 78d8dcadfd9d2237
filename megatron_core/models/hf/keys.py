"""Types and ranges of the keys of config.json."""

from typing import Any

from megatron_core.config.tables import read_table
from megatron_core.errors import CheckpointError, shortened

_TABLE: dict[str, Any] = read_table(__file__)
KINDS: dict[str, str] = {key: kind for kind, keys in _TABLE["keys"].items() for key in keys.split()}
"""A key -> its kind, in ``keys.yaml``."""
RANGES: dict[str, tuple[float, float]] = {kind: tuple(ends) for kind, ends in _TABLE["ranges"].items()}
"""A kind of number -> its smallest and its largest value."""
LARGEST = 3e38
"""The largest float, as float32 goes."""


def check_keys(theirs: dict[str, Any], inside: str = "") -> None:
    """``CheckpointError`` for the first key whose value has another type or range than it must have.

    Keys that no architecture reads are not checked, and null is legal: the key is then absent. ``inside`` is the key
    of the object that holds ``theirs``.
    """
    for key, value in theirs.items():
        kind = KINDS.get(key)
        if kind is None or value is None:
            continue
        problem = _problem(kind, value)
        if problem:
            raise CheckpointError(f"config.json says {inside}{key}={shortened(repr(value))}; it must be {problem}")
        if kind == "object":
            check_keys(value, f"{inside}{key}.")


def _problem(kind: str, value: object) -> str:
    """The legal values if ``value`` is not one of them, and else an empty text."""
    if kind in RANGES:
        least, most = RANGES[kind]
        whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return "" if whole else f"an integer from {least:,} to {most:,}"
    if kind in ("number", "positive"):
        legal = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
        if kind == "positive":
            return "" if legal and value else "a finite number above 0"
        return "" if legal else "a finite number from 0 on"
    if kind == "strings":
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return "" if is_list else "a list of strings"
    types: dict[str, tuple[type, str]] = {
        "switch": (bool, "true or false"),
        "string": (str, "a string"),
        "object": (dict, "an object"),
    }
    expected, words = types[kind]
    return "" if isinstance(value, expected) else words
