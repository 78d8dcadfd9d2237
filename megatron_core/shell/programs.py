"""Output of programs that only compute with their arguments, and of printf."""

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_core.shell.arithmetic import Names, UnknownNumber, calculate
from megatron_core.shell.limits import join_texts
from megatron_core.shell.patterns import MOST_ROUNDS, unescaped
from megatron_core.shell.unknown import UNKNOWN, unknown

_FORMAT = re.compile(r"%(?:(%)|([-+ 0#]*\d*(?:\.\d+)?)([sbqcdiuoxXeEfFgG]))")
MOST_DIGITS = 4
"""Maximum number of digits of the width or precision of a value of printf."""


def printed(words: list[str], name: str) -> str:
    """The output of a program that only computes with its arguments; an unknown value called ``name`` for others."""
    text = _printed(words)
    return unknown(name) if text is None else text


def _printed(words: list[str]) -> str | None:
    path, *suffixes = [word for word in words[1:] if not word.startswith("-")] or [""]
    match words[0]:
        case "dirname" | "basename" if UNKNOWN.search(path) or any(re.match("-.*[^-]", word) for word in words[1:]):
            return None
        case "dirname":
            return str(Path(path).parent)
        case "basename":
            return Path(path).name.removesuffix(suffixes[0] if suffixes else "")
        case "realpath" | "readlink":
            return words[-1]
        case "printf" if len(words) > 1:
            return formatted(words[1], words[2:])
        case "expr":
            return _expression(" ".join(words[1:]))
        case "seq" if all(word.isdigit() for word in words[1:]) and 2 <= len(words) <= 4:
            numbers = [*([1] * (len(words) == 2)), *map(int, words[1:])]
            step = numbers[1] if len(numbers) == 3 else 1
            return "\n".join(map(str, range(numbers[0], numbers[-1] + 1, step)[:MOST_ROUNDS])) if step else None
    return None


def _expression(text: str) -> str | None:
    def absent(name: str, index: str | None) -> str:
        raise UnknownNumber(name)

    try:
        return str(calculate(text, Names(absent, lambda name, index, value: None)))
    except UnknownNumber:
        return None


def formatted(pattern: str, values: list[str]) -> str | None:
    """The output of printf; None if it is not known."""
    places = [conversion for conversion in _FORMAT.finditer(pattern) if not conversion[1]]
    if "%" in _FORMAT.sub("", pattern):
        return None
    remaining = iter(values)
    rounds = max(-(-len(values) // len(places)) if places else 1, 1)
    pieces = (piece for _ in range(min(rounds, MOST_ROUNDS)) for piece in _round(pattern, remaining))
    return join_texts(pieces, "the output of printf")


def _round(pattern: str, values: Iterator[str]) -> Iterator[str | None]:
    """The texts of a format; of one of its values None if it is not known."""
    position = 0
    for match in _FORMAT.finditer(pattern):
        yield unescaped(pattern[position : match.start()])
        yield "%" if match[1] else _value(match[2], match[3], next(values, None))
        position = match.end()
    yield unescaped(pattern[position:])


def _value(width: str, conversion: str, value: str | None) -> str | None:
    if any(len(size) > MOST_DIGITS for size in re.findall(r"\d+", width)):
        return None
    if value is not None and UNKNOWN.search(value):
        return value if not width and conversion in "sdi" else None
    if conversion in "sbqc":
        text = {"b": unescaped, "q": _escaped, "c": lambda text: text[:1]}.get(conversion, str)(value or "")
        return f"%{width}s" % text
    try:
        if conversion in "diuoxX":
            number = int(value or "0", 8 if re.match("0[0-7]", value or "") else 0)
            return f"%{width}{'d' if conversion in 'iu' else conversion}" % number
        return f"%{width}{conversion}" % float(value or "0")
    except ValueError:
        return None


def _escaped(text: str) -> str:
    return re.sub(r"([^\w@%+=:,./-])", r"\\\1", text) or "''"
