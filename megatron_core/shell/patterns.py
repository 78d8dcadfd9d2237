"""Patterns, brace expressions and escapes of bash."""

import re
from collections.abc import Iterator
from itertools import islice, product

from megatron_core.shell.limits import require_size
from megatron_core.shell.tokens import end_of_part

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
    return re.sub(r"\[:(\w+):\]", lambda match: _CLASSES.get(match[1], match[0]), text)


def regular_expression(pattern: str) -> str:
    """The regular expression of a pattern of file names, with the extended ones such as ``@(a|b)``."""
    pieces = []
    position = 0
    while position < len(pattern):
        char = pattern[position]
        end = position + 1
        if char == "\\":
            end = position + 2
            pieces.append(re.escape(pattern[position + 1 : end]))
        elif char in "?*+@!" and pattern.startswith("(", end) and (close := _closing(pattern, end)):
            inner = "|".join(map(regular_expression, _alternatives(pattern[end + 1 : close])))
            pieces.append(f"(?:{inner}){_REPEATED[char]}" if char != "!" else f"(?!(?:{inner})$).*")
            end = close + 1
        elif char == "[" and (
            bracket := re.compile(r"\[([!^]?)(\]?(?:\[:\w+:\]|\\.|[^]])*)\]").match(pattern, position)
        ):
            inner = with_classes(re.sub(r"\[(?!:)", r"\\[", bracket[2]))
            pieces.append(f"[{'^' if bracket[1] else ''}{inner}]")
            end = bracket.end()
        else:
            pieces.append({"*": ".*", "?": "."}.get(char, re.escape(char)))
        position = end
    return "".join(pieces)


def _closing(pattern: str, position: int) -> int | None:
    """Index of the parenthesis that closes the one at ``position``."""
    depth = 0
    for index in range(position, len(pattern)):
        if pattern[index - 1] != "\\":
            depth += (pattern[index] == "(") - (pattern[index] == ")")
        if depth == 0:
            return index
    return None


def _alternatives(text: str, separator: str = "|", pair: str = "()") -> list[str]:
    """``text`` split at separators that are not within brackets, quotes or expansions."""
    pieces = [""]
    depth = 0
    position = 0
    while position < len(text):
        end = end_of_part(text, position)
        depth += (text[position] == pair[0]) - (text[position] == pair[1])
        if text[position] == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += text[position:end]
        position = end
    return pieces


def unescaped(text: str) -> str:
    """``text`` with the characters of its escapes, as in ``$'...'``, ``echo -e`` and printf."""

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        if name[0] == "x" and len(name) > 1:
            return chr(int(name[1:], 16))
        if name[0] in "01234567":
            return chr(int(name, 8) % 256)
        return _ESCAPES.get(name, name if name in "\\'\"?" else match[0])

    return _ESCAPE.sub(replaced, text)


def brace_words(raw: str) -> list[str]:
    """The words of ``a{b,c}d`` and ``{1..3}``; ``raw`` alone if it has no such expression."""
    pieces: list[list[str]] = [[""]]
    position = 0
    while position < len(raw):
        try:
            end = end_of_part(raw, position)
            close = _closing_brace(raw, position) if raw[position] == "{" else None
        except ValueError:
            return [raw]
        expansion = _brace_expression(raw[position + 1 : close]) if close is not None else None
        if expansion is not None and close is not None:
            pieces.append(expansion[:MOST_ROUNDS])
            end = close + 1
        elif len(pieces[-1]) == 1:
            pieces[-1] = [pieces[-1][0] + raw[position:end]]
        else:
            pieces.append([raw[position:end]])
        position = end
    words = list[str]()
    size = 0
    for combination in islice(product(*pieces), MOST_ROUNDS):
        words.append("".join(combination))
        size += len(words[-1])
        require_size(size, "the words of a brace expression")
    return words


def _closing_brace(raw: str, position: int) -> int | None:
    depth = 0
    while position < len(raw):
        depth += (raw[position] == "{") - (raw[position] == "}")
        if depth == 0:
            return position
        position = end_of_part(raw, position)
    return None


def _brace_expression(inner: str) -> list[str] | None:
    alternatives = _alternatives(inner, ",", "{}")
    if len(alternatives) > 1:
        return list(islice((word for alternative in alternatives for word in brace_words(alternative)), MOST_ROUNDS))
    numbers = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", inner)
    if numbers:
        sequence = _sequence(int(numbers[1]), int(numbers[2]), int(numbers[3] or 1))
        is_padded = any(re.match(r"-?0\d", number) for number in numbers.groups()[:2] if number)
        width = max(len(numbers[1]), len(numbers[2])) if is_padded else 0
        return [f"{number:0{width}d}" for number in sequence]
    letters = re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d+))?", inner)
    if letters:
        return [chr(code) for code in _sequence(ord(letters[1]), ord(letters[2]), int(letters[3] or 1))]
    return None


def _sequence(start: int, end: int, step: int) -> Iterator[int]:
    size = abs(step) or 1
    yield from (
        range(start, end + 1, size)[:MOST_ROUNDS] if start <= end else range(start, end - 1, -size)[:MOST_ROUNDS]
    )
