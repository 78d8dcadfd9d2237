"""Operations on the value of a variable, as in ``${name%pattern}``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from megatron_core.shell.limits import require_size
from megatron_core.shell.tokens import end_of
from megatron_core.shell.unknown import is_intact, unknown

ALTERNATIVE = re.compile(r"(:?)([-=+?])")
"""Operations that give another value if the variable is set, or is not."""
Text = TypeVar("Text", str, list[str])


def is_known(number: str) -> bool:
    """Whether a text is an integer, or empty."""
    return re.fullmatch(r"(-?\d+)?", number) is not None


def part_of(whole: Text, start: int, count: str) -> Text:
    """``${name:start:count}`` of a text or array; an empty ``count`` means up to the end."""
    size = len(whole)
    begin = start if start >= 0 else size + start
    if begin < 0:
        return whole[:0]
    number = int(count) if count else size
    return whole[begin : begin + number] if number >= 0 else whole[begin : size + number]


def changed(value: str, operation: str, name: str, pattern: Callable[[str], str], text: Callable[[str], str]) -> str:
    """``value`` after an operation; an unknown value called ``name`` if the operation would cut an unknown one.

    ``pattern`` gives the regular expression of a word, ``text`` its value.
    """
    found = re.match(r"%%|%|##|#|//|/#|/%|/|\^\^|\^|,,|,|@", operation)
    if found is None:
        return value if not operation else unknown(name)
    kind, rest = found[0], operation[found.end() :]
    try:
        if kind[0] in "%#":
            result = _trimmed(value, re.compile(pattern(rest), re.DOTALL), kind)
        elif kind[0] == "/":
            result = _replaced(value, kind, rest, pattern, text)
        elif kind == "@":
            transformed = {"U": str.upper, "L": str.lower, "u": lambda text: text[:1].upper() + text[1:], "Q": _quoted}
            result = transformed[rest](value) if rest in transformed else unknown(name)
        else:
            result = _cased(value, kind, re.compile(pattern(rest) or ".", re.DOTALL))
    except re.error:
        return unknown(name)
    return result if is_intact(result) else unknown(name)


def _trimmed(value: str, pattern: re.Pattern[str], kind: str) -> str:
    """``value`` without the shortest, or with a double sign the longest, end or start that matches."""
    size = len(value)
    for length in range(size + 1) if len(kind) == 1 else range(size, -1, -1):
        if kind[0] == "#" and pattern.fullmatch(value, 0, length):
            return value[length:]
        if kind[0] == "%" and pattern.fullmatch(value, size - length):
            return value[: size - length]
    return value


def _replaced(value: str, kind: str, rest: str, pattern: Callable[[str], str], text: Callable[[str], str]) -> str:
    at = 1 if rest.startswith("/") and kind in ("/", "//") else 0
    while at < len(rest) and rest[at] != "/":
        at = end_of(rest, at) if rest[at] in "\\'\"`$" else at + 1
    found, new = pattern(rest[:at]), text(rest[at + 1 :])
    if not found:
        return new + value if kind == "/#" else value + new if kind == "/%" else value
    found = {"/#": rf"\A(?:{found})", "/%": rf"(?:{found})\Z"}.get(kind, f"(?:{found})")
    compiled, size = re.compile(found, re.DOTALL), 0

    def replacement(match: re.Match[str]) -> str:
        nonlocal size
        size += len(new)
        require_size(size, "a value with replaced parts")
        return new if match[0] or kind != "//" else ""

    return compiled.sub(replacement, value, 0 if kind == "//" else 1)


def _cased(value: str, kind: str, pattern: re.Pattern[str]) -> str:
    change = str.upper if kind[0] == "^" else str.lower
    places = range(len(value)) if len(kind) == 2 else range(min(len(value), 1))
    letters = list(value)
    for at in places:
        letters[at] = change(value[at]) if pattern.fullmatch(value[at]) else value[at]
    return "".join(letters)


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
