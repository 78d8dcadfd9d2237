"""Patterns, brace expressions and escapes of bash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product

from megatron_core.shell.limits import require_size
from megatron_core.shell.tokens import end_of

MOST_ROUNDS = 1_000
"""Maximum number of rounds of a loop, and of words of a brace expression or sequence."""
_CLASSES = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": " \\t", "digit": "0-9", "lower": "a-z", "punct": "!-/:-@\\[-`{-~",
    "space": "\\s", "upper": "A-Z", "xdigit": "0-9a-fA-F", "word": "\\w",
}  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|0?[0-7]{1,3}|.)", re.DOTALL)
_REPEATED = {"@": "", "?": "?", "*": "*", "+": "+"}


def escaped_pattern(text: str) -> str:
    """A pattern of file names that matches ``text`` alone."""
    return re.sub(r"([\\*?\[\]()|!+@^-])", r"\\\1", text)


def with_classes(text: str) -> str:
    """``text`` with the characters of POSIX classes such as ``[:space:]``."""
    return re.sub(r"\[:(\w+):\]", lambda found: _CLASSES.get(found[1], found[0]), text)


def regular_expression(pattern: str) -> str:
    """The regular expression of a pattern of file names, with the extended ones such as ``@(a|b)``."""
    found, at = [], 0
    while at < len(pattern):
        char, end = pattern[at], at + 1
        if char == "\\":
            end = at + 2
            found.append(re.escape(pattern[at + 1 : end]))
        elif char in "?*+@!" and pattern.startswith("(", end) and (close := _closing(pattern, end)):
            inner = "|".join(map(regular_expression, _alternatives(pattern[end + 1 : close])))
            found.append(f"(?:{inner}){_REPEATED[char]}" if char != "!" else f"(?!(?:{inner})$).*")
            end = close + 1
        elif char == "[" and (bracket := re.compile(r"\[([!^]?)(\]?(?:\[:\w+:\]|\\.|[^]])*)\]").match(pattern, at)):
            inner = with_classes(re.sub(r"\[(?!:)", r"\\[", bracket[2]))
            found.append(f"[{'^' if bracket[1] else ''}{inner}]")
            end = bracket.end()
        else:
            found.append({"*": ".*", "?": "."}.get(char, re.escape(char)))
        at = end
    return "".join(found)


def _closing(pattern: str, at: int) -> int | None:
    """Index of the parenthesis that closes the one at ``at``."""
    depth = 0
    for index in range(at, len(pattern)):
        if pattern[index - 1] != "\\":
            depth += (pattern[index] == "(") - (pattern[index] == ")")
        if depth == 0:
            return index
    return None


def _alternatives(text: str, separator: str = "|", pair: str = "()") -> list[str]:
    """``text`` split at separators that are not within brackets, quotes or expansions."""
    parts, depth, at = [""], 0, 0
    while at < len(text):
        end = end_of(text, at) if text[at] in "\\'\"`$" else at + 1
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if text[at] == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += text[at:end]
        at = end
    return parts


def unescaped(text: str) -> str:
    """``text`` with the characters of its escapes, as in ``$'...'``, ``echo -e`` and printf."""

    def replaced(found: re.Match[str]) -> str:
        name = found[1]
        if name[0] == "x" and len(name) > 1:
            return chr(int(name[1:], 16))
        if name[0] in "01234567":
            return chr(int(name, 8) % 256)
        return _ESCAPES.get(name, name if name in "\\'\"?" else found[0])

    return _ESCAPE.sub(replaced, text)


def brace_words(raw: str) -> list[str]:
    """The words of ``a{b,c}d`` and ``{1..3}``; ``raw`` alone if it has no such expression."""
    parts: list[list[str]] = [[""]]
    at = 0
    while at < len(raw):
        try:
            end = end_of(raw, at) if raw[at] in "\\'\"`$" else at + 1
            close = _closing_brace(raw, at) if raw[at] == "{" else None
        except ValueError:
            return [raw]
        words = _brace_expression(raw[at + 1 : close]) if close is not None else None
        if words is not None and close is not None:
            parts.append(words[:MOST_ROUNDS])
            end = close + 1
        elif len(parts[-1]) == 1:
            parts[-1] = [parts[-1][0] + raw[at:end]]
        else:
            parts.append([raw[at:end]])
        at = end
    found, size = list[str](), 0
    for each in islice(product(*parts), MOST_ROUNDS):
        found.append("".join(each))
        size += len(found[-1])
        require_size(size, "the words of a brace expression")
    return found


def _closing_brace(raw: str, at: int) -> int | None:
    depth = 0
    while at < len(raw):
        depth += (raw[at] == "{") - (raw[at] == "}")
        if depth == 0:
            return at
        at = end_of(raw, at) if raw[at] in "\\'\"`$" else at + 1
    return None


def _brace_expression(inner: str) -> list[str] | None:
    parts = _alternatives(inner, ",", "{}")
    if len(parts) > 1:
        return list(islice((word for part in parts for word in brace_words(part)), MOST_ROUNDS))
    found = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", inner)
    if found:
        numbers = _sequence(int(found[1]), int(found[2]), int(found[3] or 1))
        is_padded = any(re.match(r"-?0\d", number) for number in found.groups()[:2] if number)
        width = max(len(found[1]), len(found[2])) if is_padded else 0
        return [f"{number:0{width}d}" for number in numbers]
    letters = re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?", inner)
    if letters:
        return [chr(code) for code in _sequence(ord(letters[1]), ord(letters[2]), int(letters[3] or 1))]
    return None


def _sequence(first: int, last: int, step: int) -> Iterator[int]:
    size = abs(step) or 1
    yield from (
        range(first, last + 1, size)[:MOST_ROUNDS] if first <= last else range(first, last - 1, -size)[:MOST_ROUNDS]
    )
