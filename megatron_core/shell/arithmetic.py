"""Arithmetic of bash: integers of 64 bits, variables and assignments."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

_TOKEN = re.compile(
    r"\s*(\d+#[0-9A-Za-z@_]+|0[xX][0-9A-Fa-f]+|\d+|[A-Za-z_]\w*|<<=|>>=|\*\*|\+\+|--|&&|\|\||<<|>>|[-+*/%&|^<>=!]=|"
    r"[-+*/%&|^<>=!~?:,()\[\]])"
)
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"|": operator.or_}, {"^": operator.xor}, {"&": operator.and_}, {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63)},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: _quotient(a, b), "%": lambda a, b: a - b * _quotient(a, b)},
)  # fmt: skip
"""Binary operators, from the weakest; before them are ``||`` and ``&&``, after them ``**``."""
_ALL = {name: function for level in _LEVELS for name, function in level.items()}
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg, "+": operator.pos, "!": operator.not_, "~": operator.invert,
}  # fmt: skip
DEEPEST = 20
"""Maximum nesting of variables whose values are expressions."""

Value = Callable[[], int]


class UnknownNumber(ValueError):
    """An expression that cannot be understood, or whose value is not known."""


@dataclass
class Names:
    """Access to the variables of an expression, by name and index or key; the index is None without brackets."""

    get: Callable[[str, str | None], str]
    """Return the text of a variable; "" if it is empty; raises ``UnknownNumber``."""
    set: Callable[[str, str | None, str], None]


def calculate(text: str, names: Names, depth: int = 0) -> int:
    """The value of an arithmetic expression; its assignments are executed. ``UnknownNumber`` if it has none."""
    if depth > DEEPEST:
        raise UnknownNumber(text)
    parser = _Parser(_tokens(text), names, depth)
    if not parser.tokens:
        return 0
    value = parser.sequence()
    if parser.position != len(parser.tokens):
        raise UnknownNumber(text)
    return value()


@lru_cache(maxsize=1024)
def _tokens(text: str) -> tuple[str, ...]:
    tokens = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnknownNumber(text)
        tokens.append(match[1])
        position = match.end()
    return tuple(tokens)


def _quotient(left: int, right: int) -> int:
    if right == 0:
        raise UnknownNumber("division by 0")
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise UnknownNumber("negative exponent")
    return pow(base, exponent, 2**64)


@dataclass
class _Parser:
    """A parser by recursive descent; each method returns a function that computes the value."""

    tokens: tuple[str, ...]
    names: Names
    depth: int
    position: int = 0

    def _next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _accept(self, *texts: str) -> str:
        text = self._next()
        if text not in texts:
            return ""
        self.position += 1
        return text

    def _require(self, text: str) -> None:
        if not self._accept(text):
            raise UnknownNumber(f"{text} is missing")

    def sequence(self) -> Value:
        values = [self._assignment()]
        while self._accept(","):
            values.append(self._assignment())
        return lambda: [value() for value in values][-1]

    def _assignment(self) -> Value:
        start = self.position
        if self._next().isidentifier():
            name, index = self._name()
            if how := self._accept(
                "=", *(f"{operator}=" for operator in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>"))
            ):
                right = self._assignment()
                if how == "=":
                    return lambda: self._set(name, index, right())
                function = _ALL[how[:-1]]
                return lambda: self._set(name, index, function(self._get(name, index), right()))
        self.position = start
        return self._conditional()

    def _conditional(self) -> Value:
        test = self._either()
        if not self._accept("?"):
            return test
        body = self.sequence()
        self._require(":")
        other = self._assignment()
        return lambda: body() if test() else other()

    def _either(self) -> Value:
        value = self._both()
        while self._accept("||"):
            value = _joined(value, self._both(), ends=True)
        return value

    def _both(self) -> Value:
        value = self._binary(0)
        while self._accept("&&"):
            value = _joined(value, self._binary(0), ends=False)
        return value

    def _binary(self, level: int) -> Value:
        if level == len(_LEVELS):
            return self._raised()
        value = self._binary(level + 1)
        while how := self._accept(*_LEVELS[level]):
            value = _applied(_ALL[how], value, self._binary(level + 1))
        return value

    def _raised(self) -> Value:
        base = self._unary()
        return _applied(_power, base, self._raised()) if self._accept("**") else base

    def _unary(self) -> Value:
        if how := self._accept("++", "--"):
            name, index = self._name()
            step = 1 if how == "++" else -1
            return lambda: self._set(name, index, self._get(name, index) + step)
        if how := self._accept("-", "+", "!", "~"):
            value = self._unary()
            return lambda: _wrapped(_UNARY[how](value()))
        return self._primary()

    def _primary(self) -> Value:
        if self._accept("("):
            value = self.sequence()
            self._require(")")
            return value
        if self._next().isidentifier():
            name, index = self._name()
            if how := self._accept("++", "--"):
                step = 1 if how == "++" else -1
                return lambda: self._set(name, index, self._get(name, index) + step) - step
            return lambda: self._get(name, index)
        text = self._next()
        self.position += 1
        number = _number(text)
        return lambda: number

    def _name(self) -> tuple[str, str | None]:
        name = self._next()
        if not name.isidentifier():
            raise UnknownNumber(name)
        self.position += 1
        if not self._accept("["):
            return name, None
        start = self.position
        depth = 1
        while depth:
            if self.position >= len(self.tokens):
                raise UnknownNumber(name)
            depth += (self.tokens[self.position] == "[") - (self.tokens[self.position] == "]")
            self.position += 1
        return name, " ".join(self.tokens[start : self.position - 1])

    def _get(self, name: str, index: str | None) -> int:
        return calculate(self.names.get(name, index), self.names, self.depth + 1)

    def _set(self, name: str, index: str | None, value: int) -> int:
        self.names.set(name, index, str(_wrapped(value)))
        return _wrapped(value)


def _joined(left: Value, right: Value, *, ends: bool) -> Value:
    """``||`` if a true left side ends the computation, else ``&&``."""
    return lambda: int(ends) if bool(left()) == ends else int(bool(right()))


def _applied(function: Callable[[int, int], int], left: Value, right: Value) -> Value:
    return lambda: _wrapped(int(function(left(), right())))


def _number(text: str) -> int:
    base, sharp, digits = text.partition("#")
    try:
        if sharp and int(base) <= 36:
            return _wrapped(int(digits, int(base)))
        is_octal = len(text) > 1 and text[0] == "0" and text[1] not in "xX"
        return _wrapped(int(text, 8 if is_octal else 0))
    except ValueError:
        raise UnknownNumber(text) from None
