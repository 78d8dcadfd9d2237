"""Operations on the value of a variable, as in ``${name%pattern}``."""

import re
from collections.abc import Callable
from typing import TypeVar

from megatron_core.shell.limits import require_size
from megatron_core.shell.tokens import end_of_part
from megatron_core.shell.unknown import has_whole_unknowns, unknown

ALTERNATIVE = re.compile(r"(:?)([-=+?])")
"""Operations that give another value if the variable is set, or is not."""
Text = TypeVar("Text", str, list[str])


def is_known(number: str) -> bool:
    """Whether a text is an integer, or empty."""
    return re.fullmatch(r"(-?\d+)?", number) is not None


def slice_of(value: Text, start: int, count: str) -> Text:
    """``${name:start:count}`` of a text or array; an empty ``count`` means up to the end."""
    size = len(value)
    begin = start if start >= 0 else size + start
    if begin < 0:
        return value[:0]
    number = int(count) if count else size
    return value[begin : begin + number] if number >= 0 else value[begin : size + number]


def apply_operation(
    value: str, operation: str, name: str, pattern: Callable[[str], str], text: Callable[[str], str]
) -> str:
    """``value`` after an operation; an unknown value called ``name`` if the operation would cut an unknown one.

    ``pattern`` gives the regular expression of a word, ``text`` its value.
    """
    operator = re.match(r"%%|%|##|#|//|/#|/%|/|\^\^|\^|,,|,|@", operation)
    if operator is None:
        return value if not operation else unknown(name)
    sign = operator[0]
    word = operation[operator.end() :]
    try:
        if sign[0] in "%#":
            result = _trimmed(value, re.compile(pattern(word), re.DOTALL), sign)
        elif sign[0] == "/":
            result = _replaced(value, sign, word, pattern, text)
        elif sign == "@":
            transformed = {"U": str.upper, "L": str.lower, "u": lambda text: text[:1].upper() + text[1:], "Q": _quoted}
            result = transformed[word](value) if word in transformed else unknown(name)
        else:
            result = _cased(value, sign, re.compile(pattern(word) or ".", re.DOTALL))
    except re.error:
        return unknown(name)
    return result if has_whole_unknowns(result) else unknown(name)


def _trimmed(value: str, pattern: re.Pattern[str], sign: str) -> str:
    """``value`` without the shortest, or with a double sign the longest, end or start that matches."""
    size = len(value)
    for length in range(size + 1) if len(sign) == 1 else range(size, -1, -1):
        if sign[0] == "#" and pattern.fullmatch(value, 0, length):
            return value[length:]
        if sign[0] == "%" and pattern.fullmatch(value, size - length):
            return value[: size - length]
    return value


def _replaced(value: str, sign: str, word: str, pattern: Callable[[str], str], text: Callable[[str], str]) -> str:
    position = 1 if word.startswith("/") and sign in ("/", "//") else 0
    while position < len(word) and word[position] != "/":
        position = end_of_part(word, position)
    expression = pattern(word[:position])
    new = text(word[position + 1 :])
    if not expression:
        return {"/#": new + value, "/%": value + new}.get(sign, value)
    expression = {"/#": rf"\A(?:{expression})", "/%": rf"(?:{expression})\Z"}.get(sign, f"(?:{expression})")
    compiled = re.compile(expression, re.DOTALL)
    size = 0

    def replacement(match: re.Match[str]) -> str:
        nonlocal size
        size += len(new)
        require_size(size, "a value with replaced parts")
        return new if match[0] or sign != "//" else ""

    return compiled.sub(replacement, value, 0 if sign == "//" else 1)


def _cased(value: str, sign: str, pattern: re.Pattern[str]) -> str:
    change = str.upper if sign[0] == "^" else str.lower
    places = range(len(value)) if len(sign) == 2 else range(min(len(value), 1))
    letters = list(value)
    for index in places:
        letters[index] = change(value[index]) if pattern.fullmatch(value[index]) else value[index]
    return "".join(letters)


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
