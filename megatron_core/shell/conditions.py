"""Conditions of a shell script, with a third value for what cannot be known without running it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from megatron_core.shell.expansion import UNKNOWN, Variables

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__, "-ne": int.__ne__, "-lt": int.__lt__, "-le": int.__le__, "-gt": int.__gt__, "-ge": int.__ge__,
}  # fmt: skip


def holds(words: list[tuple[str, str]], variables: Variables, *, globs: bool) -> bool | None:
    """The value of the words of ``[ ]``; each word as it is written and with its value."""
    values = [value for _, value in words]
    for operators, combine in ((("||", "-o"), _either), (("&&", "-a"), _both)):
        for at, (raw, _) in enumerate(words):
            if raw in operators and 0 < at < len(words) - 1:
                left, right = (holds(part, variables, globs=globs) for part in (words[:at], words[at + 1 :]))
                return combine(left, right)
    if values[:1] == ["!"] and len(values) > 1:
        status = holds(words[1:], variables, globs=globs)
        return None if status is None else not status
    if values[:1] == ["("] and values[-1:] == [")"]:
        return holds(words[1:-1], variables, globs=globs)
    if len(values) == 2 and values[0] == "-v":
        return variables.get(values[1]) is not None
    variables.has_doubt = variables.has_doubt or any(map(UNKNOWN.search, values))
    found = [known(value) for value in values]
    if None in found:
        return None
    return _compare([value or "" for value in found], globs)


def known(value: str) -> str | None:
    """``value`` with "" for variables that are not set; None if it has the output of a program."""
    is_output = any(name.startswith(("output-of-", "arithmetic")) for name in UNKNOWN.findall(value))
    return None if is_output else UNKNOWN.sub("", value)


def _either(left: bool | None, right: bool | None) -> bool | None:
    return True if True in (left, right) else None if None in (left, right) else False


def _both(left: bool | None, right: bool | None) -> bool | None:
    return False if False in (left, right) else None if None in (left, right) else True


def _compare(values: list[str], globs: bool) -> bool | None:
    """The value of a condition with at most one operator; None for one about files."""
    if len(values) == 1:
        return values[0] not in ("", "-n")
    if len(values) == 2 or values[:1] == ["-z"]:
        return {"-z": not any(values[1:]), "-n": bool(values[1:] and values[1])}.get(values[0]) if values else False
    if len(values) != 3:
        return False if not values else None
    left, operator, right = values
    if operator in ("=", "==", "!="):
        is_equal = fnmatch.fnmatchcase(left, right) if globs else left == right
        return is_equal == (operator != "!=")
    if operator in _NUMBERS:
        numbers = [int(value) for value in (left, right) if re.fullmatch(r"\s*[+-]?\d+\s*", value)]
        return _NUMBERS[operator](*numbers) if len(numbers) == 2 else False
    if operator == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    return {"<": left < right, ">": left > right}.get(operator)
