"""Conditions of a shell script: true, false, or unknown without running it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_core.shell.expansion import Variables
from megatron_core.shell.unknown import UNKNOWN

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__, "-ne": int.__ne__, "-lt": int.__lt__, "-le": int.__le__, "-gt": int.__gt__, "-ge": int.__ge__,
}  # fmt: skip
_TEXTS = ("=", "==", "!=", "=~", "<", ">")
_FILES = ("-ef", "-nt", "-ot")


def holds(words: Sequence[str], variables: Variables, *, is_double: bool) -> bool | None:
    """The value of the words of ``[ ]``, or as they are written of ``[[ ]]``; None if it is not known."""
    return _Condition(list(words), variables, is_double).either() if words else False


def known(value: str) -> str | None:
    """``value`` with "" for variables that are not set; None if it has the output of a program."""
    is_output = any(name.startswith(("output-of-", "arithmetic")) for name in UNKNOWN.findall(value))
    return None if is_output else UNKNOWN.sub("", value)


@dataclass
class _Condition:
    """A parser by recursive descent that computes the value."""

    words: list[str]
    variables: Variables
    is_double: bool
    position: int = 0

    def _is(self, *words: str, ahead: int = 0) -> bool:
        return self.position + ahead < len(self.words) and self.words[self.position + ahead] in words

    def either(self) -> bool | None:
        value = self._both()
        while self._is("||", "-o") and self.position > 0:
            self.position += 1
            other = self._both()
            if value is not True:
                value = other if value is False or other is True else None
        return value

    def _both(self) -> bool | None:
        value = self._not()
        while self._is("&&", "-a"):
            self.position += 1
            other = self._not()
            if value is not False:
                value = other if value is True or other is False else None
        return value

    def _not(self) -> bool | None:
        if self._is("!") and len(self.words) - self.position > 1 and not self._is(*_TEXTS, *_NUMBERS, ahead=1):
            self.position += 1
            value = self._not()
            return None if value is None else not value
        if self._is("(") and not self._is(*_TEXTS, ahead=1):
            self.position += 1
            value = self.either()
            self.position += 1
            return value
        return self._primary()

    def _primary(self) -> bool | None:
        left = self._take()
        if self._is(*_TEXTS, *_NUMBERS, *_FILES) and self.position + 1 < len(self.words):
            how = self._take()
            return self._compared(left, how, self._take())
        is_operator = re.fullmatch(r"-[a-zA-Z]", left) and self.position < len(self.words)
        if not is_operator or self._is("&&", "||", "-a", "-o", ")"):
            text = self._known(self._value(left))
            return None if text is None else text != ""
        operand = self._value(self._take())
        if left == "-v":
            return bool(self.variables.fields(f"${{{operand}+x}}"))
        text = self._known(operand)
        return None if text is None or left not in ("-z", "-n") else (text == "") == (left == "-z")

    def _take(self) -> str:
        self.position += 1
        return self.words[self.position - 1] if self.position <= len(self.words) else ""

    def _value(self, word: str) -> str:
        return self.variables.text(word) if self.is_double else word

    def _known(self, value: str) -> str | None:
        self.variables.has_doubt = self.variables.has_doubt or UNKNOWN.search(value) is not None
        return known(value)

    def _compared(self, left: str, how: str, right: str) -> bool | None:
        first, second = (self._known(self._value(word)) for word in (left, right))
        if first is None or second is None or how in _FILES:
            return None
        if how in _NUMBERS:
            return self._numbers(first, how, second)
        if how in ("<", ">"):
            return first < second if how == "<" else first > second
        if not self.is_double:
            return (first == second) == (how != "!=")
        try:
            if how == "=~":
                match = re.search(UNKNOWN.sub("", self.variables.expression(right)), first)
                groups = [] if match is None else [match[0], *(group or "" for group in match.groups())]
                self.variables.assign("BASH_REMATCH", groups)
                return match is not None
            pattern = UNKNOWN.sub("", self.variables.pattern(right))
            return (re.fullmatch(pattern, first, re.DOTALL) is not None) == (how != "!=")
        except re.error:
            return None

    def _numbers(self, left: str, how: str, right: str) -> bool | None:
        values = [self.variables.arithmetic(word) if self.is_double else word.strip() for word in (left, right)]
        if any(not re.fullmatch(r"[+-]?\d+", value) for value in values):
            return None if self.is_double and any(map(UNKNOWN.search, values)) else False
        return _NUMBERS[how](*map(int, values))
