"""Expansion of words of a shell script: quotes, variables, arithmetic."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_core.errors import ConfigError
from megatron_core.shell.syntax import end_of

Value = str | list[str] | dict[str, str]
LONGEST = 1_000_000
"""Maximum number of characters of a value."""
MOST_ROUNDS = 1_000
"""Maximum number of rounds of a loop, and of numbers in a sequence."""
_START, _END = "\ue000", "\ue001"
UNKNOWN = re.compile(f"{_START}([^{_END}]*){_END}")
"""Place of a value that is not known without running the script; the group is its name."""
_PARAMETER = re.compile(r"(!?)(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^]]*)\])?(.*)", re.DOTALL)
_COMPARISONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b), ast.Mod: lambda a, b: a - b * int(a / b), ast.Pow: lambda a, b: a ** min(b, 64),
    **_COMPARISONS, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def unknown(name: str) -> str:
    """A value that is not known, with a name for messages."""
    return f"{_START}{re.sub(r'[^!-~]+', '-', name)[:60]}{_END}"


def readable(text: str) -> str:
    """``text`` with ``<name>`` for each unknown value."""
    return UNKNOWN.sub(r"<\1>", text)


@dataclass
class _Fields:
    """Words that are being built; unquoted text is split at blanks unless ``whole``."""

    whole: bool
    done: list[str] = field(default_factory=list)
    current: str | None = None

    def flush(self) -> None:
        if self.current is not None and not self.whole:
            self.done.append(self.current)
            self.current = None

    def quoted(self, text: str) -> None:
        self.current = (self.current or "") + text

    def unquoted(self, text: str) -> None:
        if self.whole:
            self.quoted(text)
            return
        for number, piece in enumerate(re.split(r"[ \t\r\n]+", text)):
            if number:
                self.flush()
            if piece:
                self.quoted(piece)

    def several(self, values: list[str], *, quoted: bool) -> None:
        for number, value in enumerate(values):
            if number and self.whole:
                self.quoted(" ")
            elif number:
                self.flush()
            (self.quoted if quoted else self.unquoted)(value)


@dataclass
class Variables:
    """The variables of a script and the expansion of its words."""

    arguments: list[str]
    values: dict[str, Value]
    name: str = ""
    """Value of ``$0``."""
    output_of: Callable[[str], str] = unknown
    """Output of a command in ``$(...)``."""
    unset: dict[str, None] = field(default_factory=dict)
    """Names of the variables that were read without being set, in this order."""
    has_doubt: bool = False
    """Whether a condition since this was set to False has a value that is not known."""
    skipped: set[str] = field(default_factory=set)
    """Names that branches assign which are not followed; such a variable is empty if it is not set."""
    doubtful: set[str] = field(default_factory=set)
    """The same if the condition has a value that is not known; such a variable is not known."""

    has_absent_scripts: bool = False
    """Whether a script that may assign variables could not be read."""

    def fields(self, raw: str) -> list[str]:
        """The words that a word of the script becomes."""
        into = _Fields(whole=False)
        self._expand(raw, into)
        into.flush()
        return into.done

    def text(self, raw: str) -> str:
        """The value of a word that is not split, as in an assignment."""
        into = _Fields(whole=True)
        self._expand(raw, into)
        return into.current or ""

    def assign(self, name: str, value: Value) -> None:
        """Set a variable; ``ConfigError`` for a value that is too long."""
        if sum(map(len, [value] if isinstance(value, str) else value)) > LONGEST:
            raise ConfigError(f"{self.name}: the value of {name} has more than {LONGEST} characters")
        self.values[name] = value

    @contextmanager
    def restored(self, before: Mapping[str, Value | None]) -> Iterator[None]:
        """Set variables to the values in ``before`` at the end, or unset them."""
        try:
            yield
        finally:
            kept = {name: value for name, value in self.values.items() if name not in before}
            self.values = kept | {name: value for name, value in before.items() if value is not None}

    def get(self, name: str) -> Value | None:
        """The value of a variable or parameter; None if it is not set."""
        if name.isdigit():
            number = int(name)
            return self.name if number == 0 else self.arguments[number - 1] if number <= len(self.arguments) else None
        if name in "@*":
            return self.arguments
        return {"#": str(len(self.arguments)), "?": "0", "$": "1", "!": "1", "-": ""}.get(name, self.values.get(name))

    def is_empty(self, name: str) -> bool:
        """Whether a variable that is not set is empty, because only branches assign it which are not followed."""
        return name in self.skipped and name not in self.doubtful

    def _expand(self, raw: str, into: _Fields) -> None:
        at = 0
        while at < len(raw):
            end = _checked_end(raw, at)
            part = raw[at:end]
            if part[0] == "\\":
                into.quoted(part[1:].lstrip("\n"))
            elif part[0] == "'":
                into.quoted(part[1:-1])
            elif part.startswith("$'"):
                into.quoted(re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), part[2:-1]))
            elif part[0] == '"':
                self._expand_quoted(part[1:-1], into)
            elif part[0] in "$`" and len(part := _parameter(raw, at)) > 1:
                end = at + len(part)
                into.several(self._parts(part), quoted=False)
            else:
                into.quoted(part)
            at = end

    def _expand_quoted(self, raw: str, into: _Fields) -> None:
        """Expand the inside of double quotes."""
        at, is_empty = 0, raw != ""
        while at < len(raw):
            end = at + 1
            if raw[at] == "\\" and raw[at + 1 : at + 2] in ("\\", '"', "$", "`", "\n"):
                end = at + 2
                into.quoted(raw[at + 1].strip("\n"))
                is_empty = False
            elif raw[at] in "$`" and len(part := _parameter(raw, at)) > 1:
                end = at + len(part)
                values = self._parts(part)
                if re.fullmatch(r"\$(\*|\{\w+\[\*\]\})", part):
                    separator = self.get("IFS")
                    is_known = isinstance(separator, str) and not UNKNOWN.search(separator)
                    values = [(str(separator)[:1] if is_known else " ").join(values)]
                into.several(values, quoted=True)
                is_empty = is_empty and not values
            else:
                into.quoted(raw[at])
                is_empty = False
            at = end
        if not is_empty:  # "" is a word, "${empty[@]}" is not
            into.quoted("")

    def _parts(self, part: str) -> list[str]:
        """The values of an expansion; several of ``$@`` and ``${array[@]}``."""
        if part.startswith("$(("):
            return [self.arithmetic(part[3:-2])]
        if part.startswith("$["):
            return [self.arithmetic(part[2:-1])]
        if part.startswith("$("):
            return [self.output_of(part[2:-1])]
        if part[0] == "`":
            return [self.output_of(re.sub(r"\\([\\$`])", r"\1", part[1:-1]))]
        found = _PARAMETER.fullmatch(part[2:-1] if part.startswith("${") else part[1:])
        if found is None:
            return [unknown(part)]
        indirect, length, name, index, operation = found.groups()
        if indirect and index in ("@", "*"):
            value = self.get(name)
            return list(value) if isinstance(value, dict) else [str(i) for i in range(len(value or ""))]
        if indirect:
            name = self.text(f"${{{name}}}")
        values = self._values(name, index)
        if length:
            return [str(len(values or ()) if index in ("@", "*") or name in "@*" else len((values or [""])[0]))]
        may_be_set = self.has_absent_scripts or name in self.doubtful
        if values is None and index in ("@", "*") and not operation and not may_be_set:
            return []  # the environment has no arrays
        return self._operate(name, values, operation)

    def _values(self, name: str, index: str | None) -> list[str] | None:
        value = self.get(name)
        if value is None or isinstance(value, str):
            return None if value is None else [value]
        if index in ("@", "*") or name in "@*":
            return list(value.values() if isinstance(value, dict) else value)
        key = self.text(index or "0")
        if isinstance(value, dict):
            return [value[key]] if key in value else None
        key = self.arithmetic(key)
        at = int(key) if re.fullmatch(r"-?\d+", key) else len(value)
        return [value[at]] if -len(value) <= at < len(value) else None

    def _operate(self, name: str, values: list[str] | None, operation: str) -> list[str]:
        """Apply what follows the name in ``${name...}``."""
        kind = re.match(r":?[-=+?]|%%|%|##|#|//|/|\^\^?|,,?|:", operation)
        rest = operation[kind.end() :] if kind else ""
        is_set = values is not None and (values != [""] or not operation.startswith(":"))
        match kind[0][-1] if kind else "":
            case "-" | "=":
                if not is_set:
                    values = [self.text(rest)]
                    if "=" in operation[:2]:
                        self.assign(name, values[0])
                return values or []
            case "+":
                return [self.text(rest)] if is_set else []
        if values is None and self.is_empty(name):
            values = [""]
        if values is None:
            self.unset.setdefault(name)
            return [unknown(name if not name.isdigit() else f"argument-{name}")]
        match kind[0] if kind else "":
            case "%" | "%%" | "#" | "##":
                return [_trimmed(value, self.text(rest), operation) for value in values]
            case "/" | "//":
                pattern, _, new = rest.partition("/")
                found = re.compile(fnmatch.translate(self.text(pattern)).removesuffix(r"\Z"))
                once, new = operation[:2] != "//", self.text(new).replace("\\", r"\\")
                return [found.sub(new, value, int(once)) for value in values]
            case "^" | "^^" | "," | ",,":
                every = (str.upper if "^" in operation else str.lower) if kind else str
                return [every(v) if len(kind[0]) > 1 else every(v[:1]) + v[1:] for v in values] if kind else values
            case ":":
                start, _, count = (self.arithmetic(part) for part in rest.partition(":"))
                if not re.fullmatch(r"-?\d+", start):
                    return [unknown(name)]
                long = int(count) if re.fullmatch(r"\d+", count) else None
                chosen = values if len(values) > 1 else values[0]
                cut = chosen[int(start) :] if long is None else chosen[int(start) :][:long]
                return [cut] if isinstance(cut, str) else cut
        return values

    def arithmetic(self, raw: str) -> str:
        """The value of an arithmetic expression; an unknown one if a variable is not set."""
        into = _Fields(whole=True)
        self._expand_quoted(raw.replace('"', ""), into)
        text = (into.current or "").strip()
        change = re.fullmatch(r"([A-Za-z_]\w*)\s*(\+\+|--|[-+*/%]?=(?!=))\s*(.*)", text, re.DOTALL)
        if change:
            name, how, right = change.groups()
            step = {"++": "1", "--": "1"}.get(how, right)
            changed = self.arithmetic(right if how == "=" else f"{name} {how[0]} ({step})")
            self.assign(name, changed)
            return changed
        if UNKNOWN.search(text):
            return unknown("arithmetic")
        text = re.sub(r"\b[A-Za-z_]\w*", self._number, text)
        text = re.sub(r"\b0[0-7]+\b", lambda found: str(int(found[0], 8)), text)
        text = re.sub(r"([^?]+)\?([^?:]+):(.+)", r"(\2) if (\1) else (\3)", text)
        text = text.replace("&&", " and ").replace("||", " or ")
        text = re.sub(r"!(?!=)", " not ", text).strip() or "0"
        try:
            value = _calculate(ast.parse(text, mode="eval").body)
            return str(value) if abs(value) < 2**63 else unknown("arithmetic")
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return unknown("arithmetic")

    def _number(self, found: re.Match[str]) -> str:
        value = self.get(found[0])
        if value is None and self.is_empty(found[0]):
            return "0"
        if value is None:
            self.unset.setdefault(found[0])
        text = value if isinstance(value, str) else "?"
        return text if re.fullmatch(r"\s*-?\d+\s*", text) else "?"


def _checked_end(raw: str, at: int) -> int:
    try:
        return end_of(raw, at)
    except ValueError:
        return len(raw)


def _parameter(raw: str, at: int) -> str:
    """The expansion that begins at ``at``; ``$`` alone if there is none."""
    if raw[at] == "`" or raw.startswith(("$(", "${", "$["), at):
        return raw[at : _checked_end(raw, at)]
    found = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(raw, at)
    return found[0] if found else raw[at]


def _trimmed(value: str, pattern: str, operation: str) -> str:
    """``value`` without the shortest, or with a double sign the longest, end or start that matches."""
    ends = operation[0] == "%"
    lengths = range(len(value) + 1) if operation[:2] not in ("%%", "##") else range(len(value), -1, -1)
    for length in lengths:
        part = value[len(value) - length :] if ends else value[:length]
        if fnmatch.fnmatchcase(part, pattern):
            return value[: len(value) - length] if ends else value[length:]
    return value


def _calculate(node: ast.expr) -> int:
    """The value of an expression of integers; ``ValueError`` for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=op, operand=operand):
            value = _calculate(operand)
            return -value if isinstance(op, ast.USub) else int(not value) if isinstance(op, ast.Not) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            numbers = _calculate(left), _calculate(right)
            if max(map(abs, numbers)) < 2**63:
                return _OPERATIONS[type(op)](*numbers)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATIONS:
            return int(_OPERATIONS[type(op)](_calculate(left), _calculate(right)))
        case ast.IfExp(test=test, body=body, orelse=other):
            return _calculate(body if _calculate(test) else other)
        case ast.BoolOp(op=op, values=values):
            truths = _truths(values)
            return int(all(truths) if isinstance(op, ast.And) else any(truths))
    raise ValueError(ast.dump(node))


def _truths(values: list[ast.expr]) -> Iterator[bool]:
    return (bool(_calculate(value)) for value in values)


def _formatted(pattern: str, values: list[str]) -> str | None:
    """The output of printf; None for other formats than %s and %d, other escapes than \\n and \\t, and for numbers of
    values that do not fit."""
    places = len(re.findall(r"%[sd]", pattern))
    if pattern.count("%") != places or len(values) % max(places, 1) or (values and not places):
        return None
    pattern, left = pattern.replace("\\n", "\n").replace("\\t", "\t"), iter(values)
    if "\\" in pattern:
        return None
    text = pattern * max(len(values) // max(places, 1), 1)
    return re.sub(r"%[sd]", lambda _: next(left, ""), text).removesuffix("\n")


def printed(words: list[str], name: str) -> str:
    """The output of a program that only computes with its arguments; an unknown value called ``name`` for others."""
    text = _printed(words)
    return unknown(name) if text is None else text


def _printed(words: list[str]) -> str | None:
    path, *further = [word for word in words[1:] if not word.startswith("-")] or [""]
    match words[0]:
        case "dirname" | "basename" if UNKNOWN.search(path) or any(re.match("-.*[^-]", word) for word in words[1:]):
            return None
        case "dirname":
            return str(Path(path).parent)
        case "basename":
            return Path(path).name.removesuffix(further[0] if further else "")
        case "realpath" | "readlink":
            return words[-1]
        case "printf" if len(words) > 1:
            return _formatted(words[1], words[2:])
        case "expr":
            return Variables([], {}).arithmetic(" ".join(words[1:]))
        case "seq" if all(word.isdigit() for word in words[1:]) and len(words) in (2, 3):
            first, last = (1, int(words[1])) if len(words) == 2 else map(int, words[1:])
            return "\n".join(map(str, range(first, min(last, first + MOST_ROUNDS) + 1)))
    return None
