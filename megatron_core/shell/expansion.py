"""Expansion of words of a shell script: quotes, variables, output of commands, arithmetic."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_core.shell.arithmetic import Names, UnknownNumber, calculate
from megatron_core.shell.fields import BLANKS, Fields
from megatron_core.shell.limits import MOST_CHARACTERS, require_size
from megatron_core.shell.operations import ALTERNATIVE, apply_operation, is_known, slice_of
from megatron_core.shell.patterns import brace_words, escaped_pattern, regular_expression, unescaped, with_classes
from megatron_core.shell.tokens import INDEX, end_of
from megatron_core.shell.tree import Document
from megatron_core.shell.unknown import UNKNOWN, unknown

Value = str | list[str] | dict[str, str]
_PARAMETER = re.compile(rf"(!?)(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:{INDEX})?(.*)", re.DOTALL)


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
    status: int | None = 0
    """Value of ``$?``; None if it is not known, because a program gave it."""
    has_doubt: bool = False
    """Whether a condition since this was set to False has a value that is not known."""
    skipped: set[str] = field(default_factory=set)
    """Names that branches assign which are not followed; such a variable is empty if it is not set."""
    doubtful: set[str] = field(default_factory=set)
    """The same if the condition has a value that is not known; such a variable is not known."""
    exported: set[str] = field(default_factory=set)
    """Names of the variables, and functions, that programs get."""
    integers: set[str] = field(default_factory=set)
    """Names of the variables whose values are arithmetic expressions (declare -i)."""
    references: dict[str, str] = field(default_factory=dict)
    """Variables that stand for another one (declare -n)."""

    spent: int = 0
    """Number of characters and words of all values, outputs and commands so far."""
    has_absent_scripts: bool = False
    """Whether a script that may assign variables could not be read."""

    def fields(self, raw: str) -> list[str]:
        """The words that a word of the script becomes."""
        into = Fields(self.separators)
        for word in brace_words(raw):
            self._expand(self._with_home(word), into)
            into.flush()
        return into.done

    def all_fields(self, words: Sequence[str]) -> list[str]:
        """The words that several words of the script become. ``ConfigError`` if they are too long."""
        fields = list[str]()
        size = 0
        for word in words:
            values = self.fields(word)
            size += size_of(values)
            require_size(size, f"{self.name}: a list of words")
            fields += values
        return fields

    def spend(self, size: int) -> None:
        """Count characters that are kept. ``ConfigError`` if there are too many."""
        self.spent += size
        require_size(self.spent, f"{self.name}: all values together", MOST_CHARACTERS)

    def text(self, raw: str) -> str:
        """The value of a word that is not split, as in an assignment."""
        into = Fields(None)
        self._expand(self._with_home(raw), into)
        return into.current or ""

    def pattern(self, raw: str) -> str:
        """The regular expression of a word that is a pattern of file names."""
        into = Fields(None, escaped_pattern)
        self._expand(raw, into)
        return regular_expression(into.current or "")

    def expression(self, raw: str) -> str:
        """The regular expression behind ``=~``."""
        into = Fields(None, re.escape)
        self._expand(raw, into, keeps_escapes=True)
        return with_classes(into.current or "")

    def document(self, document: Document) -> str:
        """The text on the standard input of a command."""
        if document.source == "literal":
            return document.text
        if document.source == "command":
            return self.output_of(document.text) + "\n"
        if document.source == "word":
            return self.text(document.text) + "\n"
        into = Fields(None)
        self._expand_quoted(document.text, into, escapes="\\$`\n")
        return into.current or ""

    @property
    def separators(self) -> str:
        """The value of IFS."""
        value = self.values.get("IFS")
        is_default = not isinstance(value, str) or UNKNOWN.search(value) or value == " \t\n"
        return BLANKS if is_default else str(value)

    def assign(self, name: str, value: Value) -> None:
        """Set a variable; ``ConfigError`` for a value that is too long."""
        name = self.references.get(name, name)
        if isinstance(value, str) and name in self.integers:
            value = self.arithmetic(value)
        size = size_of([value] if isinstance(value, str) else value)
        require_size(size, f"{self.name}: the value of {name}")
        self.spend(size)
        self.values[name] = value

    def assign_element(self, name: str, key: str, value: str) -> None:
        """Set an element of a map or array; an index behind the end of an array appends."""
        old = self.get(name)
        if isinstance(old, dict):
            self.assign(name, old | {self.text(key): value})
            return
        if not isinstance(old, list):
            old = [old] if old else []
        number = self.arithmetic(key)
        index = int(number) if re.fullmatch(r"-?\d+", number) else len(old)
        index = min(index if index >= 0 else max(len(old) + index, 0), len(old))
        self.assign(name, [*old[:index], value, *old[index + 1 :]])

    @contextmanager
    def restored(self, before: Mapping[str, Value | None]) -> Iterator[None]:
        """Set variables to the values in ``before`` at the end, or unset them."""
        try:
            yield
        finally:
            unchanged = {name: value for name, value in self.values.items() if name not in before}
            self.values = unchanged | {name: value for name, value in before.items() if value is not None}

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore all at the end, except the names that were read without being set."""
        names = {member.name for member in dataclasses.fields(self)} - {"unset", "status", "has_doubt", "spent"}
        saved = {name: getattr(self, name) for name in names}
        for name, value in saved.items():
            if isinstance(value, (list, dict, set)):
                setattr(self, name, value.copy())
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(self, name, value)

    def get(self, name: str) -> Value | None:
        """The value of a variable or parameter; None if it is not set."""
        if name.isdigit():
            number = int(name)
            values = [self.name, *self.arguments]
            return values[number] if number < len(values) else None
        if name in "@*":
            return self.arguments
        name = self.references.get(name, name)
        special = {"#": str(len(self.arguments)), "?": str(self.status or 0), "$": "1", "!": "1", "-": ""}
        return special.get(name, self.values.get(name))

    def is_empty(self, name: str) -> bool:
        """Whether a variable that is not set is empty, because only branches assign it which are not followed."""
        return name in self.skipped and name not in self.doubtful

    def _with_home(self, raw: str) -> str:
        home = self.values.get("HOME")
        return f"'{home}'{raw[1:]}" if isinstance(home, str) and re.match(r"~(/|$)", raw) else raw

    def _expand(self, raw: str, into: Fields, *, is_value: bool = False, keeps_escapes: bool = False) -> None:
        """Expand a word; ``is_value``: its unquoted text is split like a value."""
        position = 0
        while position < len(raw):
            end = _checked_end(raw, position)
            piece = raw[position:end]
            if piece[0] == "\\":
                text = piece[1:].lstrip("\n")
                into.literal(piece) if keeps_escapes else into.quoted(text)
            elif piece[0] == "'":
                into.quoted(piece[1:-1])
            elif piece.startswith("$'"):
                into.quoted(unescaped(piece[2:-1]))
            elif piece[0] == '"':
                self._expand_quoted(piece[1:-1], into)
            elif raw.startswith('$"', position):  # a translated text
                pass
            elif piece[0] in "$`" and len(piece := _parameter(raw, position)) > 1:
                end = position + len(piece)
                self._insert(piece, into, quoted=False)
            else:
                (into.unquoted if is_value else into.literal)(piece)
            position = end

    def _expand_quoted(self, raw: str, into: Fields, *, escapes: str = '\\"$`\n', has_quotes: bool = False) -> None:
        """Expand the inside of double quotes; ``has_quotes``: further double quotes are left out."""
        position = 0
        is_empty = raw != ""
        while position < len(raw):
            end = position + 1
            before = (len(into.done), into.current)
            if raw[position] == "\\" and raw[position + 1 : position + 2] and raw[position + 1] in escapes:
                end = position + 2
                into.quoted(raw[position + 1].strip("\n"))
            elif raw[position] in "$`" and len(piece := _parameter(raw, position)) > 1:
                end = position + len(piece)
                self._insert(piece, into, quoted=True)
            elif not (has_quotes and raw[position] == '"'):
                into.quoted(raw[position])
            is_empty = is_empty and before == (len(into.done), into.current)
            position = end
        if not is_empty:  # "" is a word, "${empty[@]}" is not
            into.quoted("")

    def _insert(self, piece: str, into: Fields, *, quoted: bool) -> None:
        """Add the values of an expansion; several of ``$@`` and ``${array[@]}``."""
        if piece.startswith("$((") and piece.endswith("))"):
            values = [self.arithmetic(piece[3:-2])]
        elif piece.startswith("$["):
            values = [self.arithmetic(piece[2:-1])]
        elif piece.startswith("$("):
            values = [self.output_of(piece[2:-1])]
        elif piece[0] == "`":
            values = [self.output_of(re.sub(r"\\([\\$`])", r"\1", piece[1:-1]))]
        elif parameter := _PARAMETER.fullmatch(piece[2:-1] if piece.startswith("${") else piece[1:]):
            self._insert_parameter(parameter, into, quoted=quoted)
            return
        else:
            values = [unknown(piece)]
        into.several(values, quoted=quoted)

    def _insert_parameter(self, parameter: re.Match[str], into: Fields, *, quoted: bool) -> None:
        indirect, length, name, index, operation = parameter.groups()
        if indirect and index in ("@", "*"):
            value = self.get(name)
            elements = [value] if isinstance(value, str) else value or []
            keys = elements if isinstance(elements, dict) else range(len(elements))
            into.several(list(map(str, keys)), quoted=quoted)
            return
        if indirect and operation in ("@", "*"):
            into.several(sorted(variable for variable in self.values if variable.startswith(name)), quoted=quoted)
            return
        if indirect and (target := _PARAMETER.fullmatch(self.text(f"${{{name}}}"))):
            name = target[3]
            index = target[4]
        elif indirect:
            name = self.text(f"${{{name}}}")
        values = self._values(name, index)
        if length:
            count = len(values or ()) if index in ("@", "*") or name in "@*" else len((values or [""])[0])
            into.several([str(count)], quoted=quoted)
            return
        if (alternative := ALTERNATIVE.match(operation)) and self._insert_alternative(
            name, alternative, operation[alternative.end() :], values, into, quoted=quoted
        ):
            return
        result = self._changed(name, index, "" if alternative else operation, values)
        if (index == "*" or name == "*") and (quoted or into.whole):
            separators = self.values.get("IFS")
            first = separators[:1] if isinstance(separators, str) and not UNKNOWN.search(separators) else " "
            result = [first.join(result)]
        into.several(result, quoted=quoted)

    def _insert_alternative(
        self, name: str, alternative: re.Match[str], word: str, values: list[str] | None, into: Fields, *, quoted: bool
    ) -> bool:
        """Add what ``${name:-word}`` and its like give in place of the value; whether they do."""
        is_set = bool(values) and (alternative[1] == "" or " ".join(values or ()) != "")
        if alternative[2] == "+" and not is_set:
            if quoted and values != []:  # of an array without elements there is no word
                into.quoted("")
            return True
        if is_set != (alternative[2] == "+") or alternative[2] == "?":
            return False
        if alternative[2] == "=":
            self.assign(name, self.text(word))
            into.several([self.text(word)], quoted=quoted)
        elif quoted:
            self._expand_quoted(word, into, has_quotes=True)
        else:
            self._expand(word, into, is_value=True)
        return True

    def _values(self, name: str, index: str | None) -> list[str] | None:
        value = self.get(name)
        if value is None or isinstance(value, str):
            return None if value is None or index not in (None, "@", "*", "0", "-1") else [value]
        if index in ("@", "*") or name in "@*":
            return list(value.values() if isinstance(value, dict) else value)
        key = self.text(index or "0")
        if isinstance(value, dict):
            return [value[key]] if key in value else None
        key = self.arithmetic(key)
        position = int(key) if re.fullmatch(r"-?\d+", key) else len(value)
        return [value[position]] if -len(value) <= position < len(value) else None

    def _changed(self, name: str, index: str | None, operation: str, values: list[str] | None) -> list[str]:
        """Apply what follows the name in ``${name...}``."""
        is_array = index in ("@", "*") or name in "@*"
        if values is None:
            may_be_set = self.has_absent_scripts or name in self.doubtful
            if is_array and not may_be_set:
                return []  # the environment has no arrays
            if not self.is_empty(name):
                self.unset.setdefault(name)
                return [unknown(name if not name.isdigit() else f"argument-{name}")]
            values = [""]
        if operation[:1] == ":":
            start, _, count = (self.arithmetic(number) if number else "" for number in operation[1:].partition(":"))
            if not all(is_known(number) for number in (start, count)):
                return [unknown(name)]
            if not is_array:
                return [slice_of(value, int(start or 0), count) for value in values]
            items = [self.name, *values] if name in "@*" else values
            return slice_of(items, int(start or 0), count)
        return [apply_operation(value, operation, name, self.pattern, self.text) for value in values]

    def arithmetic(self, raw: str) -> str:
        """The value of an arithmetic expression; an unknown one if a variable is not set."""
        into = Fields(None)
        self._expand_quoted(raw.replace('"', ""), into)
        text = into.current or ""
        if UNKNOWN.search(text):
            return unknown("arithmetic")
        try:
            return str(calculate(text, Names(self._number_text, self._assign_number)))
        except (UnknownNumber, RecursionError):
            return unknown("arithmetic")

    def _number_text(self, name: str, index: str | None) -> str:
        values = self._values(name, index)
        if values is None and (self.is_empty(name) or index is not None):
            return ""
        if values is None:
            self.unset.setdefault(name)
        if not values or UNKNOWN.search(values[0]):
            raise UnknownNumber(name)
        return values[0]

    def _assign_number(self, name: str, index: str | None, value: str) -> None:
        if index is None:
            self.assign(name, value)
        else:
            self.assign_element(name, index, value)


def size_of(words: Iterable[str]) -> int:
    """Number of words and of their characters."""
    return sum(len(word) + 1 for word in words)


def _checked_end(raw: str, position: int) -> int:
    try:
        return end_of(raw, position)
    except ValueError:
        return len(raw)


def _parameter(raw: str, position: int) -> str:
    """The expansion that begins at ``position``; ``$`` alone if there is none."""
    if raw[position] == "`" or raw.startswith(("$(", "${", "$["), position):
        return raw[position : _checked_end(raw, position)]
    match = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(raw, position)
    return match[0] if match else raw[position]
