"""Words and operators of shell scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_core.errors import ConfigError, shortened

INDEX = r"\[((?:[^][]|\[[^]]*\])*)\]"
"""Index of an array, which may have an index itself; the group is its text."""
ASSIGNMENT = re.compile(rf"([A-Za-z_]\w*)(?:{INDEX})?(\+?)=")
REDIRECTIONS = frozenset({"<<<", "<<-", "<<", ">>", "<&", ">&", "&>", "&>>", "<>", ">|", "<", ">"})
_OPERATORS = (
    ";;&", "&&", "||", ";;", ";&", "<<<", "<<-", "<<", ">>", "<&", ">&", "&>>", "&>", "<>", ">|", *";|&()<>\n",
)  # fmt: skip
_PAIRS = {"$(": ")", "${": "}", "$[": "]", "(": ")", "<(": ")", ">(": ")"}
_BEFORE_GROUP = tuple("?*+@!")
"""Characters that begin an extended pattern such as ``@(a|b)``."""


@dataclass(frozen=True)
class Token:
    """A word with its quotes, or an operator."""

    text: str
    line: int
    is_word: bool
    document: str = ""
    """Text of a here-document, expression of ``((``, or the file descriptor of a redirection."""
    is_literal: bool = False
    """Whether a here-document has no expansions."""


def end_of(text: str, at: int) -> int:
    """Index behind the quotation, expansion or character at ``at``; ``ValueError`` if its end is missing."""
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] == "'":
        return text.index("'", at + 1) + 1
    if text.startswith("$'", at):
        found = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL).match(text, at)
        if found is None:
            raise ValueError
        return found.end()
    if text[at] in '"`':
        inner = at + 1
        while text[inner : inner + 1] != text[at]:
            if inner >= len(text):
                raise ValueError
            is_part = text[inner] in "\\$`" if text[at] == '"' else text[inner] == "\\"
            inner = end_of(text, inner) if is_part and not text.startswith("$'", inner) else inner + 1
        return inner + 1
    for opening, end in _PAIRS.items():
        if text.startswith(opening, at):
            return _end_of_pair(text, at + len(opening), end)
    return at + 1


def _end_of_pair(text: str, at: int, end: str) -> int:
    while text[at : at + 1] != end:
        if at >= len(text):
            raise ValueError
        if end == ")" and text[at] == "#" and text[at - 1] in " \t\n(;":
            at = _end_of_comment(text, at)
        else:
            is_part = text[at] in "\\'\"`$" or (text[at] == "(" and end == ")")
            at = end_of(text, at) if is_part else at + 1
    return at + 1


def _end_of_comment(text: str, at: int) -> int:
    """Index of the end of the line; of the parenthesis behind the comment if the text has one line."""
    end = text.find("\n", at)
    return end if end >= 0 else at + 1


@dataclass
class _Tokenizer:
    """Splits a text."""

    text: str
    name: str
    line: int = 1
    is_test: bool = False
    """Whether the place is between ``[[`` and ``]]``."""
    last: str = ""
    """The last word."""
    waiting: list[tuple[str, bool, str]] = field(default_factory=list)
    """End, literality and operator of the here-documents that begin with the next line."""

    def tokens(self) -> Iterator[Token]:
        text, at = self.text, 0
        while at < len(text):
            end, found = at + 1, None
            if text.startswith(("\\\n", "\\\r\n"), at):
                end = text.index("\n", at) + 1
            elif text[at] == "#":
                end = text.find("\n", at) if "\n" in text[at:] else len(text)
            elif self.is_test and self.last == "=~" and text[at] not in " \t\r\n":
                end, found = self._word(at)
            elif text.startswith("((", at) and not self.is_test and (close := _arithmetic_end(text, at)):
                end, found = close, Token("((", self.line, False, text[at + 2 : close - 2])
            elif (operator := _operator(text, at)) is not None:
                end = at + len(operator)
                if operator in ("<<", "<<-") and not self.is_test:
                    end = self._announce(end, operator)
                elif operator == "\n" and self.waiting:
                    for word, is_literal, kind in self.waiting:
                        body, end = _document(text, end, word, kind)
                        yield Token("<<", self.line, False, body, is_literal)
                    self.waiting = []
                    found = Token("\n", self.line, False)
                else:
                    found = Token(operator, self.line, False)
            elif text[at] not in " \t\r":
                number = re.compile(r"\d+(?=[<>])").match(text, at)
                if number and not self.is_test:  # 2>&1
                    operator = _operator(text, number.end()) or ""
                    end = number.end() + len(operator)
                    found = Token(operator, self.line, False, number[0])
                else:
                    end, found = self._word(at)
            if found is not None:
                yield found
            self.line += text.count("\n", at, end)
            at = end

    def _announce(self, at: int, operator: str) -> int:
        """Note a here-document; the index behind its word."""
        found = re.compile(r"[ \t]*([^\s;|&<>)]+)").match(self.text, at)
        word = found[1] if found else ""
        self.waiting.append((re.sub(r"['\"\\]", "", word), re.search(r"['\"\\]", word) is not None, operator))
        return found.end() if found else at

    def _word(self, start: int) -> tuple[int, Token]:
        end = self._word_end(start)
        word = self.text[start:end]
        if self.last != "=~" and word in ("[[", "]]"):
            self.is_test = word == "[["
        self.last = word
        return end, Token(word if "'" in word else re.sub(r"\\\r?\n", "", word), self.line, True)

    def _word_end(self, start: int) -> int:
        text, at, is_expression = self.text, start, self.is_test and self.last == "=~"
        try:
            while at < len(text):
                is_group = text[at] == "(" and (
                    is_expression or (at > start and text[at - 1] in _BEFORE_GROUP and self.is_test)
                )
                if text[at] == "(" and ASSIGNMENT.fullmatch(text, start, at):
                    at = _array_end(text, at + 1)
                elif is_group or text.startswith(("<(", ">("), at) or text[at] not in " \t\r\n;|&()<>":
                    at = end_of(text, at)
                elif is_expression and text[at] in "|<>":
                    at += 1
                else:
                    break
        except ValueError:
            shown = shortened(text[start:].split("\n")[0], 60)
            raise ConfigError(
                f"{self.name} line {self.line}: the end of the quotation or bracket in {shown} is missing"
            ) from None
        return at


def tokens(text: str, name: str) -> Iterator[Token]:
    """Words and operators; comments and joined lines are left out."""
    return _Tokenizer(text, name).tokens()


def _operator(text: str, at: int) -> str | None:
    if text.startswith(("<(", ">("), at):  # a word: the output of a command as a file
        return None
    return next((each for each in _OPERATORS if text.startswith(each, at)), None)


def _arithmetic_end(text: str, at: int) -> int | None:
    """Index behind ``((...))``; None if the parentheses at ``at`` are two subshells."""
    at, depth = at + 2, 2
    try:
        while at < len(text):
            depth += (text[at] == "(") - (text[at] == ")")
            if depth == 1:
                return at + 2 if text.startswith("))", at) else None
            at = end_of(text, at) if text[at] in "\\'\"`$" else at + 1
    except ValueError:  # a quote or expansion within is not closed
        pass
    return None


def _document(text: str, at: int, word: str, kind: str) -> tuple[str, int]:
    """The here-document that starts at ``at``, and the index behind its end."""
    lines = []
    while at < len(text):
        end = text.find("\n", at)
        line = text[at:] if end < 0 else text[at:end]
        at = len(text) if end < 0 else end + 1
        line = line.lstrip("\t") if kind == "<<-" else line
        if line.rstrip("\r") == word:
            break
        lines.append(line + "\n")
    return "".join(lines), at


def _array_end(text: str, at: int) -> int:
    while text[at : at + 1] != ")":
        if at >= len(text):
            raise ValueError
        is_comment = text[at] == "#" and text[at - 1] in " \t\n("
        at = text.index("\n", at) if is_comment else end_of(text, at) if text[at] in "\\'\"`$(" else at + 1
    return at + 1
