"""Follows a shell script without running it, and returns the programs that it would start."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError
from megatron_core.shell.assignment import assign
from megatron_core.shell.conditions import holds, known
from megatron_core.shell.expansion import MOST_ROUNDS, UNKNOWN, Value, Variables, printed, readable, unknown
from megatron_core.shell.files import find_script
from megatron_core.shell.syntax import ASSIGNMENT, parse
from megatron_core.shell.tree import (
    Arithmetic,
    Block,
    Case,
    Chain,
    Command,
    For,
    Function,
    If,
    Node,
    Pipe,
    Simple,
    Test,
    While,
    words_of,
)
from megatron_core.text_file import read_text

MOST_STEPS = 100_000
"""Maximum number of commands that are followed."""
DEEPEST = 30
"""Maximum nesting of functions and scripts."""
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")


class _Return(Exception):
    """``return``, ``break`` or ``continue``."""


@dataclass
class Interpreter:
    """Follows commands; conditions that cannot be known count as false and are in ``notes``."""

    variables: Variables
    commands: list[Command] = field(default_factory=list)
    """All programs, in their order."""
    notes: dict[str, None] = field(default_factory=dict)
    """Parts of the script that could not be followed."""
    _script: Path = Path()
    _functions: dict[str, tuple[Block, Value]] = field(default_factory=dict)
    """Body of each function, and BASH_SOURCE where it is defined."""
    _locals: list[dict[str, Value | None]] = field(default_factory=list)
    """Of each function that is followed, the outer values of its local variables."""
    _output: list[str] | None = None
    _folder: str = ""
    """Folder after ``cd`` in ``$(...)``; empty: that in which the script would run."""
    _steps: int = 0
    _depth: int = 0
    _line: int = 0
    """Line of the script with the commands in a word that are followed; 0: none."""

    @classmethod
    def of(cls, text: str, script: str, arguments: Sequence[str], values: dict[str, Value]) -> Interpreter:
        """Follow a script with its arguments and variables of the environment. ``ConfigError`` for wrong syntax."""
        known_values = {_SOURCE: script, "IFS": " \t\n"} | values
        found = cls(Variables(list(arguments), known_values, script), _script=Path(script))
        found.variables.output_of = found._output_of
        try:
            found.run(parse(text, script))
        except _Return:
            pass
        except RecursionError:
            raise ConfigError(f"{script} is nested too deeply; only simple scripts can be read") from None
        return found

    def run(self, node: Node) -> bool | None:
        """Follow a command; its success, or None if it cannot be known."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ConfigError(f"{self._script} has more than {MOST_STEPS} steps; give its launch command instead")
        match node:
            case Block(commands=commands):
                status: bool | None = True
                for each in commands:
                    status = self.run(each)
                return status
            case Simple():
                return self._simple(node)
            case Test(words=words):
                return holds([(word, self.variables.text(word)) for word in words], self.variables, globs=True)
            case Arithmetic(text=text):
                value = self.variables.arithmetic(text)
                return None if UNKNOWN.search(value) else value != "0"
            case Chain(parts=parts):
                status = True
                for operator, each in parts:
                    # A program is assumed to succeed.
                    if (status is not False) == (operator == "&&"):
                        status = self.run(each)
                return status
            case Pipe(parts=parts, negated=negated):
                with self._captured() if len(parts) > 1 else nullcontext():
                    for each in parts:
                        status = self.run(each)
                if len(parts) > 1 and self._output is not None:
                    self._output.append(unknown("output-of-a-pipe"))
                    return None
                return status if status is None or not negated else not status
            case If() | Case():
                return self._branch(node)
            case For() | While():
                return self._loop(node)
            case Function(name=name, body=body):
                self._functions[name] = body, self.variables.values.get(_SOURCE, "")
                return True

    def _branch(self, node: If | Case) -> bool | None:
        before, self.variables.has_doubt = self.variables.has_doubt, False
        bodies = [body for _, body in node.branches] + ([node.otherwise] if isinstance(node, If) else [])
        at = self._chosen(node)
        has_doubt = self.variables.has_doubt
        skipped = {
            match[1] for word in words_of((*bodies[:at], *bodies[at + 1 :])) if (match := ASSIGNMENT.match(word))
        }
        (self.variables.doubtful if has_doubt else self.variables.skipped).update(skipped)
        try:
            return self.run(bodies[at]) if at < len(bodies) else True
        finally:
            self.variables.has_doubt = before or has_doubt

    def _chosen(self, node: If | Case) -> int:
        """Index of the branch that is followed; the number of branches for ``else``, or if none is."""
        if isinstance(node, If):
            holds = (self._holds(self.run(condition), node.line) for condition, _ in node.branches)
        else:
            text = self.variables.text(node.word)
            word, self.variables.has_doubt = known(text) or "", UNKNOWN.search(text) is not None
            holds = (
                any(fnmatch.fnmatchcase(word, self.variables.text(pattern)) for pattern in patterns)
                for patterns, _ in node.branches
            )
        return next((at for at, each in enumerate(holds) if each), len(node.branches))

    def _holds(self, status: bool | None, line: int) -> bool:
        if status is None:
            self.variables.has_doubt = True
            self.notes.setdefault(f"{self._script} line {line}: this condition is not known, and is taken as false")
        return status is True

    def _loop(self, node: For | While) -> bool | None:
        if isinstance(node, For):
            for value in self._fields(node.words)[:MOST_ROUNDS]:
                self.variables.assign(node.name, value)
                if not self._round(node.body):
                    break
            return True
        for _ in range(MOST_ROUNDS):
            status = self.run(node.condition)
            if status is None or status == node.until or not self._round(node.body):
                break
        return True

    def _round(self, body: Block) -> bool:
        """Follow the body of a loop once; whether the loop continues."""
        try:
            self.run(body)
        except _Return as end:
            if end.args[0] == "return":
                raise
            return bool(end.args[0] == "continue")
        return True

    # --- one command

    def _fields(self, words: Sequence[str]) -> list[str]:
        return [value for word in words for value in self.variables.fields(word)]

    def _simple(self, node: Simple) -> bool | None:
        words, before = list(node.words), dict[str, Value | None]()
        while words and (match := ASSIGNMENT.match(words[0])):
            before.setdefault(match[1], self.variables.values.get(match[1]))
            assign(self.variables, words.pop(0), str(self._script))
        if not words:
            return True
        with self.variables.restored(before):
            return self._command(words, node)

    def _command(self, words: list[str], node: Simple) -> bool | None:
        if words[0] in ("export", "declare", "typeset", "local", "readonly"):
            return self._declare(words)
        found = self._fields(words)
        while found and found[0] in ("exec", "time", "nohup", "command", "builtin", "sudo"):
            found = found[1:]
        if not found:
            return True
        built_in: Callable[[list[str], Simple], bool | None] | None = getattr(
            self, f"_do_{_SAME_AS.get(found[0], found[0])}", None
        )
        if built_in is not None:
            return built_in(found, node)
        if found[0] in self._functions:
            return self._call(found)
        return self._program(found, node)

    def _call(self, words: list[str]) -> bool | None:
        body, source = self._functions[words[0]]
        self._locals.append({_SOURCE: self.variables.values.get(_SOURCE)})
        self.variables.values[_SOURCE] = source
        with self.variables.restored(self._locals[-1]), self._deeper(words[1:]):
            try:
                return self.run(body)
            except _Return as end:
                if end.args[0] != "return":
                    raise
                return None
            finally:
                self._locals.pop()

    def _program(self, words: list[str], node: Simple) -> bool | None:
        self.commands.append(Command(tuple(words), str(self._script), self._line or node.line))
        if self._output is not None:
            self._output.append(printed(words, f"output-of-{words[0]}"))
        at = next((at for at, word in enumerate(words) if word in (*_SHELLS, "sbatch")), None)
        if at is None:
            return None
        rest = words[at + 1 :]
        inner = next((rest[i + 1] for i, word in enumerate(rest[:-1]) if re.fullmatch(r"-\w*c", word)), None)
        if inner is not None or node.document:
            return self._text(inner or node.document, node)
        files = [i for i, word in enumerate(rest) if word.endswith((".sh", ".slurm", ".sbatch"))]
        return self._read(rest[files[0]], rest[files[0] + 1 :], started=True) if files else None

    def _nested(self, text: str, script: str, arguments: list[str]) -> bool | None:
        with self._deeper(arguments):
            return self.run(parse(text, script))

    def _read(self, name: str, arguments: list[str], *, started: bool = False) -> bool | None:
        """Follow another script if it is on this machine; ``started``: as a program of its own."""
        path, is_substitute = find_script(self._script, name)
        if path is None:
            self.variables.has_absent_scripts = True
            self.notes.setdefault(f"{readable(name)} is not on this machine, so that its variables are not known")
            return None
        if is_substitute:
            self.notes.setdefault(f"{readable(name)} is not on this machine; {path} is read in its place")
        before, self._script, own_name = self._script, path, self.variables.name
        if started:
            self.variables.name = str(path)
        try:
            with self.variables.restored({_SOURCE: self.variables.values.get(_SOURCE)}):
                self.variables.values[_SOURCE] = str(path)
                return self._nested(read_text(path), str(path), arguments)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        finally:
            self._script, self.variables.name = before, own_name

    def _declare(self, words: list[str]) -> bool:
        is_map = any(re.fullmatch(r"-\w*A\w*", word) for word in words)
        is_local = words[0] == "local" or (words[0] in ("declare", "typeset") and "-g" not in words)
        for word in words[1:]:
            if self._locals and is_local and (name := re.match(r"[A-Za-z_]\w*", word)):
                self._locals[-1].setdefault(name[0], self.variables.values.get(name[0]))
            if ASSIGNMENT.match(word):
                assign(self.variables, word, str(self._script), is_map=is_map)
            elif is_map and word.isidentifier():
                self.variables.assign(word, {})
        return True

    # --- built-in commands

    def _do_echo(self, words: list[str], node: Simple) -> bool:
        if self._output is not None:
            given = [word for word in words[1:] if word not in ("-n", "-e", "-ne")]
            self._output.append(" ".join(given))
        return True

    def _do_cd(self, words: list[str], node: Simple) -> bool:
        to = [word for word in words[1:] if not word.startswith("-")]
        if self._output is not None and to:
            self._folder = os.path.join(self._folder, to[0])
        return True

    def _do_pwd(self, words: list[str], node: Simple) -> bool:
        if self._output is not None:
            is_known = self._folder and not UNKNOWN.search(self._folder)
            self._output.append(os.path.abspath(self._folder) if is_known else unknown("output-of-pwd"))
        return True

    def _do_printf(self, words: list[str], node: Simple) -> bool | None:
        if words[1:2] != ["-v"] or len(words) < 4:
            return self._program(words, node)
        self.variables.assign(words[2], printed(["printf", *words[3:]], words[2]))
        return True

    def _do_test(self, words: list[str], node: Simple) -> bool | None:
        given = words[1:-1] if words[0] == "[" else words[1:]
        return holds([(word, word) for word in given], self.variables, globs=False)

    def _do_true(self, words: list[str], node: Simple) -> bool:
        return words[0] != "false"

    def _do_shift(self, words: list[str], node: Simple) -> bool:
        del self.variables.arguments[: int(words[1]) if len(words) > 1 and words[1].isdigit() else 1]
        return True

    def _do_set(self, words: list[str], node: Simple) -> bool:
        if "--" in words:
            self.variables.arguments = words[words.index("--") + 1 :]
        return True

    def _do_unset(self, words: list[str], node: Simple) -> bool:
        for word in words[1:]:
            self.variables.values.pop(word, None)
        return True

    def _do_let(self, words: list[str], node: Simple) -> bool:
        for word in words[1:]:
            self.variables.arithmetic(word)
        return True

    def _do_read(self, words: list[str], node: Simple) -> bool:
        for word in words[1:]:
            if word.isidentifier():
                self.variables.assign(word, (words[0] == "read" and node.document) or unknown(word))
        return False  # so that "while read" ends

    def _do_eval(self, words: list[str], node: Simple) -> bool | None:
        if any(map(UNKNOWN.search, words)):  # which may assign any variable
            self.variables.has_absent_scripts = True
        return self._text(" ".join(words[1:]), node)

    def _text(self, text: str, node: Simple) -> bool | None:
        """Follow commands in a word of the script."""
        before, self._line = self._line, self._line or node.line
        try:
            return self._nested(text, str(self._script), self.variables.arguments)
        finally:
            self._line = before

    def _do_source(self, words: list[str], node: Simple) -> bool | None:
        return self._read(words[1], words[2:] or self.variables.arguments) if len(words) > 1 else None

    def _do_exit(self, words: list[str], node: Simple) -> bool:
        if not self.commands:  # a check of the machine or of the arguments; the launch follows
            self.notes.setdefault(f"{self._script} line {node.line}: {words[0]} is ignored")
        return True

    def _do_return(self, words: list[str], node: Simple) -> bool:
        raise _Return(words[0])

    # --- nesting

    @contextmanager
    def _deeper(self, arguments: list[str]) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ConfigError(f"{self._script}: functions or scripts are nested deeper than {DEEPEST}")
        before, self.variables.arguments = self.variables.arguments, list(arguments)
        try:
            yield
        finally:
            self.variables.arguments = before
            self._depth -= 1

    @contextmanager
    def _captured(self) -> Any:
        before, self._output = self._output, []
        try:
            yield self._output
        finally:
            self._output = before

    def _output_of(self, text: str) -> str:
        """The output of a command in ``$(...)``; unknown unless it only prints."""
        with self._captured() as printed:
            before, folder, values = len(self.commands), self._folder, dict(self.variables.values)
            with self._deeper(self.variables.arguments):
                self.run(parse(text, str(self._script)))
            del self.commands[before:]
            self._folder, self.variables.values = folder, values
        return "\n".join(printed) if printed else unknown(f"output-of-{text.split()[0] if text.split() else ''}")


_SOURCE = "BASH_SOURCE"
_SAME_AS = {
    "[": "test", ":": "true", "false": "true", ".": "source", "mapfile": "read", "readarray": "read",
    "break": "return", "continue": "return",
}  # fmt: skip
"""Built-in commands that are followed as another one."""
