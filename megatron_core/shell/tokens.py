"""Words and operators of shell scripts."""

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


def end_of(text: str, position: int) -> int:
    """Index behind the quotation, expansion or character at ``position``; ``ValueError`` if its end is missing."""
    if text[position] == "\\":
        return min(position + 2, len(text))
    if text[position] == "'":
        return text.index("'", position + 1) + 1
    if text.startswith("$'", position):
        match = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL).match(text, position)
        if match is None:
            raise ValueError
        return match.end()
    if text[position] in '"`':
        inner = position + 1
        while text[inner : inner + 1] != text[position]:
            if inner >= len(text):
                raise ValueError
            is_part = text[inner] in "\\$`" if text[position] == '"' else text[inner] == "\\"
            inner = end_of(text, inner) if is_part and not text.startswith("$'", inner) else inner + 1
        return inner + 1
    for opening, end in _PAIRS.items():
        if text.startswith(opening, position):
            return _end_of_pair(text, position + len(opening), end)
    return position + 1


def _end_of_pair(text: str, position: int, end: str) -> int:
    while text[position : position + 1] != end:
        if position >= len(text):
            raise ValueError
        if end == ")" and text[position] == "#" and text[position - 1] in " \t\n(;":
            line_end = text.find("\n", position)
            position = line_end if line_end >= 0 else position + 1  # of a text of one line, the parenthesis behind it
        else:
            position = end_of_part(text, position, "(" if end == ")" else "")
    return position + 1


def end_of_part(text: str, position: int, brackets: str = "") -> int:
    """Index behind the quotation, the expansion, the pair of ``brackets`` or else the single character at
    ``position``."""
    return end_of(text, position) if text[position] in "\\'\"`$" + brackets else position + 1


@dataclass
class _Tokenizer:
    """Splits a text."""

    text: str
    name: str
    line: int = 1
    is_test: bool = False
    """Whether the place is between ``[[`` and ``]]``."""
    last_word: str = ""
    """The last word."""
    waiting: list[tuple[str, bool, str]] = field(default_factory=list)
    """End, literality and operator of the here-documents that begin with the next line."""

    def tokens(self) -> Iterator[Token]:
        text = self.text
        position = 0
        while position < len(text):
            end = position + 1
            token = None
            if text.startswith(("\\\n", "\\\r\n"), position):
                end = text.index("\n", position) + 1
            elif text[position] == "#":
                end = text.find("\n", position) if "\n" in text[position:] else len(text)
            elif self.is_test and self.last_word == "=~" and text[position] not in " \t\r\n":
                end, token = self._word(position)
            elif text.startswith("((", position) and not self.is_test and (close := _arithmetic_end(text, position)):
                end = close
                token = Token("((", self.line, False, text[position + 2 : close - 2])
            elif (sign := _operator(text, position)) is not None:
                end = position + len(sign)
                if sign in ("<<", "<<-") and not self.is_test:
                    end = self._announce(end, sign)
                elif sign == "\n" and self.waiting:
                    for word, is_literal, operator in self.waiting:
                        body, end = _document(text, end, word, operator)
                        yield Token("<<", self.line, False, body, is_literal)
                    self.waiting = []
                    token = Token("\n", self.line, False)
                else:
                    token = Token(sign, self.line, False)
            elif text[position] not in " \t\r":
                number = re.compile(r"\d+(?=[<>])").match(text, position)
                if number and not self.is_test:  # 2>&1
                    sign = _operator(text, number.end()) or ""
                    end = number.end() + len(sign)
                    token = Token(sign, self.line, False, number[0])
                else:
                    end, token = self._word(position)
            if token is not None:
                yield token
            self.line += text.count("\n", position, end)
            position = end

    def _announce(self, position: int, operator: str) -> int:
        """Note a here-document; the index behind its word."""
        match = re.compile(r"[ \t]*([^\s;|&<>)]+)").match(self.text, position)
        word = match[1] if match else ""
        self.waiting.append((re.sub(r"['\"\\]", "", word), re.search(r"['\"\\]", word) is not None, operator))
        return match.end() if match else position

    def _word(self, start: int) -> tuple[int, Token]:
        end = self._word_end(start)
        word = self.text[start:end]
        if self.last_word != "=~" and word in ("[[", "]]"):
            self.is_test = word == "[["
        self.last_word = word
        return end, Token(word if "'" in word else re.sub(r"\\\r?\n", "", word), self.line, True)

    def _word_end(self, start: int) -> int:
        text = self.text
        position = start
        is_expression = self.is_test and self.last_word == "=~"
        try:
            while position < len(text):
                is_group = text[position] == "(" and (
                    is_expression or (position > start and text[position - 1] in _BEFORE_GROUP and self.is_test)
                )
                if text[position] == "(" and ASSIGNMENT.fullmatch(text, start, position):
                    position = _array_end(text, position + 1)
                elif is_group or text.startswith(("<(", ">("), position) or text[position] not in " \t\r\n;|&()<>":
                    position = end_of(text, position)
                elif is_expression and text[position] in "|<>":
                    position += 1
                else:
                    break
        except ValueError:
            excerpt = shortened(text[start:].split("\n")[0], 60)
            raise ConfigError(
                f"{self.name} line {self.line}: the end of the quotation or bracket in {excerpt} is missing"
            ) from None
        return position


def tokens(text: str, name: str) -> Iterator[Token]:
    """Words and operators; comments and joined lines are left out."""
    return _Tokenizer(text, name).tokens()


def _operator(text: str, position: int) -> str | None:
    if text.startswith(("<(", ">("), position):  # a word: the output of a command as a file
        return None
    return next((operator for operator in _OPERATORS if text.startswith(operator, position)), None)


def _arithmetic_end(text: str, position: int) -> int | None:
    """Index behind ``((...))``; None if the parentheses at ``position`` are two subshells."""
    position = position + 2
    depth = 2
    try:
        while position < len(text):
            depth += (text[position] == "(") - (text[position] == ")")
            if depth == 1:
                return position + 2 if text.startswith("))", position) else None
            position = end_of_part(text, position)
    except ValueError:  # a quote or expansion within is not closed
        pass
    return None


def _document(text: str, position: int, word: str, operator: str) -> tuple[str, int]:
    """The here-document that starts at ``position``, and the index behind its end."""
    lines = []
    while position < len(text):
        end = text.find("\n", position)
        line = text[position:] if end < 0 else text[position:end]
        position = len(text) if end < 0 else end + 1
        line = line.lstrip("\t") if operator == "<<-" else line
        if line.rstrip("\r") == word:
            break
        lines.append(line + "\n")
    return "".join(lines), position


def _array_end(text: str, position: int) -> int:
    while text[position : position + 1] != ")":
        if position >= len(text):
            raise ValueError
        is_comment = text[position] == "#" and text[position - 1] in " \t\n("
        position = text.index("\n", position) if is_comment else end_of_part(text, position, "(")
    return position + 1
