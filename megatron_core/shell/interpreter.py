"""Follows a shell script without running it, and returns the programs that it would start."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_core.errors import ConfigError
from megatron_core.shell.assignment import assign
from megatron_core.shell.built_ins import BuiltIns, Jump, Status, lines_of
from megatron_core.shell.conditions import holds, known
from megatron_core.shell.expansion import Value, Variables, size_of
from megatron_core.shell.files import find_script, readable_folders
from megatron_core.shell.launchers import directives, variables_of
from megatron_core.shell.patterns import MOST_ROUNDS
from megatron_core.shell.programs import printed
from megatron_core.shell.state import SOURCE
from megatron_core.shell.syntax import parse
from megatron_core.shell.tokens import ASSIGNMENT
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
    Redirected,
    Simple,
    Subshell,
    Test,
    While,
    words_of,
)
from megatron_core.shell.unknown import UNKNOWN, unknown
from megatron_core.text_file import read_text

MOST_STEPS = 100_000
"""Maximum number of commands that are followed."""
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")


@dataclass
class Interpreter(BuiltIns):
    """Follows commands; conditions that cannot be known count as false and are in ``notes``."""

    commands: list[Command] = field(default_factory=list)
    """All programs, in their order."""
    _steps: int = 0
    _started: tuple[tuple[Path, list[str]], ...] = ()
    """The scripts that are followed as programs of their own, each with its arguments."""

    @classmethod
    def of(
        cls,
        text: str,
        script: str,
        arguments: Sequence[str],
        values: Mapping[str, Value],
        folders: Sequence[str] = (),
    ) -> Interpreter:
        """Follow a script with its arguments and variables of the environment.

        ``folders``: further folders whose scripts may be read. Errors: ``ConfigError`` for wrong syntax, and for a
        script that is too large or takes too long.
        """
        given: dict[str, Value] = {**variables_of(directives(text)), **values}
        known_values = {SOURCE: script, "IFS": " \t\n"} | given
        found = cls(Variables(list(arguments), known_values, script, exported=set(given)), _script=Path(script))
        found.variables.output_of = found._output_of
        found._folders = readable_folders(Path(script), folders)
        found._launcher = tuple(directives(text))
        found._started = ((Path(script).resolve(), list(arguments)),)
        try:
            found.run(parse(text, script))
        except Jump:  # ``exit`` or ``return``: the script ends here
            pass
        except RecursionError:
            raise ConfigError(f"{script} is nested too deeply; only simple scripts can be read") from None
        except ConfigError:
            raise
        except ValueError:  # a number with more digits than Python converts
            raise ConfigError(f"{script} has a number of too many digits; correct it") from None
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
            case Simple() | Test() | Arithmetic():
                return self._leaf(node)
            case Redirected():
                return self._redirected(node)
            case Subshell(body=body, may_exit=may_exit):
                return self._subshell(body, may_exit)
            case Chain(parts=parts):
                status = True
                for operator, each in parts:
                    # A program is assumed to succeed.
                    if (status is not False) == (operator == "&&"):
                        status = self.run(each)
                return status
            case Pipe():
                return self._pipe(node)
            case If() | Case():
                return self._branch(node)
            case For() | While():
                return self._loop(node)
            case Function(name=name, body=body):
                self._functions[name] = body, self.variables.values.get(SOURCE, "")
                return True

    def _leaf(self, node: Simple | Test | Arithmetic) -> bool | None:
        """Follow a command without other ones, and set ``$?``."""
        try:
            match node:
                case Simple():
                    status, code = self._simple(node), 1
                case Test(words=words):
                    status, code = holds(words, self.variables, is_double=True), 1
                case Arithmetic(text=text):
                    value, code = self.variables.arithmetic(text), 1
                    status = None if UNKNOWN.search(value) else value != "0"
        except Status as end:
            status, code = _success(end.number), end.number or 0
        self.variables.status = None if status is None else code if status is False else 0
        return status

    def _pipe(self, node: Pipe) -> bool | None:
        """Follow the parts of a pipeline, each in a subshell that reads the output of the one before."""
        status = None
        *first, last = node.parts
        with self._reading(self._input):
            for part in first:
                with self._captured() as output:
                    self._subshell(part, may_exit=False)
                self._input = lines_of("".join(output)) if output else None
            status = self._subshell(last, may_exit=False) if first else self.run(last)
        if node.negated and status is not None:
            self.variables.status = int(status)
            return not status
        return status

    def _subshell(self, body: Node, may_exit: bool) -> bool | None:
        with self._isolated():
            self._may_exit = self._may_exit or may_exit
            try:
                return self.run(body)
            except Jump as end:
                if end.kind in ("exit", "return"):
                    self.variables.status = end.number
                return _success(end.number)

    def _redirected(self, node: Redirected) -> bool | None:
        given = self._input if node.document is None else lines_of(self.variables.document(node.document))
        with self._reading(given):
            if not node.is_silent:
                return self.run(node.body)
            with self._captured() as output:
                status = self.run(node.body)
        if node.file is not None:
            self._write(self.variables.text(node.file), "".join(output), node.appends)
        return status

    def _branch(self, node: If | Case) -> bool | None:
        before, self.variables.has_doubt = self.variables.has_doubt, False
        bodies = [each[1] for each in node.branches] + ([node.otherwise] if isinstance(node, If) else [])
        chosen = self._chosen(node)
        has_doubt = self.variables.has_doubt
        others = tuple(body for at, body in enumerate(bodies) if at not in chosen)
        skipped = {match[1] for word in words_of(others) if (match := ASSIGNMENT.match(word))}
        (self.variables.doubtful if has_doubt else self.variables.skipped).update(skipped)
        status: bool | None = True
        try:
            for at in chosen:
                status = self.run(bodies[at])
            return status
        finally:
            self.variables.has_doubt = before or has_doubt

    def _chosen(self, node: If | Case) -> list[int]:
        """Indices of the branches that are followed; that of ``else`` is the number of branches."""
        if isinstance(node, If):
            holds = (self._holds(self.run(condition), node.line) for condition, _ in node.branches)
            at = next((at for at, each in enumerate(holds) if each), len(node.branches))
            return [at] if at < len(node.branches) or node.otherwise.commands else []
        text = self.variables.text(node.word)
        word, self.variables.has_doubt = known(text) or "", UNKNOWN.search(text) is not None
        chosen, continues = list[int](), False
        for at, (patterns, _, end) in enumerate(node.branches):
            if continues or any(self._matches(word, pattern) for pattern in patterns):
                chosen.append(at)
                if end == ";;":
                    break
                continues = end == ";&"
        return chosen

    def _matches(self, word: str, pattern: str) -> bool:
        try:
            return re.fullmatch(self.variables.pattern(pattern), word, re.DOTALL) is not None
        except re.error:
            return False

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
        except Jump as end:
            if end.kind not in ("break", "continue"):
                raise
            if (end.number or 1) > 1:
                raise Jump(end.kind, (end.number or 1) - 1) from None
            return end.kind == "continue"
        return True

    # --- one command

    def _fields(self, words: Sequence[str]) -> list[str]:
        return self.variables.all_fields(words)

    def _simple(self, node: Simple) -> bool | None:
        words, before = list(node.words), dict[str, Value | None]()
        while words and (match := ASSIGNMENT.match(words[0])):
            before.setdefault(match[1], self.variables.values.get(match[1]))
            assign(self.variables, words.pop(0), str(self._script))
        if not words:
            return True
        exported = before.keys() - self.variables.exported
        self.variables.exported |= exported
        try:
            with self.variables.restored(before):
                return self._command(words, node)
        finally:
            self.variables.exported -= exported

    def _command(self, words: list[str], node: Simple) -> bool | None:
        if words[0] in ("export", "declare", "typeset", "local", "readonly"):
            return self._declare(words)
        found = self._fields(words)
        while found and found[0] in ("exec", "time", "nohup", "command", "builtin", "sudo"):
            found = found[1:]
        if not found:
            return True
        name = _SAME_AS.get(found[0], found[0])
        if name in ("eval", "source", "exit"):
            return {"eval": self._eval, "source": self._source, "exit": self._exit}[name](found, node)
        if found[0] in self._functions:
            return self._call(found)
        built_in: Callable[[list[str]], bool | None] | None = getattr(self, f"_do_{name}", None)
        return built_in(found) if built_in is not None else self._program(found, node)

    def _call(self, words: list[str]) -> bool | None:
        body, source = self._functions[words[0]]
        self._locals.append({SOURCE: self.variables.values.get(SOURCE)})
        self.variables.values[SOURCE] = source
        with self.variables.restored(self._locals[-1]), self._deeper(words[1:]):
            try:
                return self.run(body)
            except Jump as end:
                if end.kind != "return":
                    raise
                raise Status(end.number) from None
            finally:
                self._locals.pop()

    def _program(self, words: list[str], node: Simple) -> bool | None:
        self.variables.spend(size_of(words))
        self.commands.append(self._command_of(words, self._line or node.line))
        at = next((at for at, word in enumerate(words) if word in (*_SHELLS, "sbatch")), None)
        if at is None:
            self._print(printed(words, f"output-of-{words[0]}") + "\n")
            return None
        rest = words[at + 1 :]
        text = next((i for i, word in enumerate(rest[:-1]) if re.fullmatch(r"-\w*c", word)), None)
        files = [i for i, word in enumerate(rest) if word.endswith((".sh", ".slurm", ".sbatch"))]
        with self._child(words[: at + 1 + (files[0] if files and words[at] == "sbatch" else 0)]):
            if text is not None:
                self.variables.name = rest[text + 2] if len(rest) > text + 2 else self.variables.name
                return self._text(rest[text + 1], node, rest[text + 3 :])
            if files:
                return self._follow(rest[files[0]], rest[files[0] + 1 :], by=words[at])
            lines, self._input = self._input, []
            return self._text("".join(lines), node, []) if lines else None

    def _nested(self, text: str, script: str, arguments: list[str]) -> bool | None:
        with self._deeper(arguments):
            return self.run(parse(text, script))

    def _follow(self, name: str, arguments: list[str], by: str = "") -> bool | None:
        """Follow another script if it is on this machine; ``by``: the shell, or sbatch, that starts it as a program."""
        path, note = find_script(self._script, name, self._folders)
        if note:
            self.notes.setdefault(note)
        if path is None:
            self.variables.has_absent_scripts = True
            return None
        before, own_name, others = self._script, self.variables.name, self._started
        if by:
            if (path.resolve(), arguments) in others:  # a job that submits its successor
                self.notes.setdefault(f"{path} starts itself, and is followed once")
                return None
            self._started, self.variables.name = (*others, (path.resolve(), arguments)), str(path)
        self._script = path
        try:
            with self.variables.restored({SOURCE: self.variables.values.get(SOURCE)}):
                self.variables.values[SOURCE] = str(path)
                text = read_text(path)
                if by == "sbatch":
                    self._read_directives(text)
                return self._nested(text, str(path), arguments)
        except Jump as end:
            if end.kind != "return":
                raise
            return _success(end.number)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        finally:
            self._script, self.variables.name, self._started = before, own_name, others

    # --- other scripts and the end of one

    def _eval(self, words: list[str], node: Simple) -> bool | None:
        if any(map(UNKNOWN.search, words)):  # which may assign any variable
            self.variables.has_absent_scripts = True
        return self._text(" ".join(words[1:]), node, self.variables.arguments)

    def _text(self, text: str, node: Simple, arguments: list[str]) -> bool | None:
        """Follow commands in a word of the script."""
        before, self._line = self._line, self._line or node.line
        try:
            return self._nested(text, str(self._script), arguments)
        finally:
            self._line = before

    def _source(self, words: list[str], node: Simple) -> bool | None:
        return self._follow(words[1], words[2:] or self.variables.arguments) if len(words) > 1 else None

    def _exit(self, words: list[str], node: Simple) -> bool:
        if self._may_exit:
            return self._do_return(words)
        if not self.commands:  # a check of the machine or of the arguments; the launch follows
            self.notes.setdefault(f"{self._script} line {node.line}: {words[0]} is ignored")
        return True

    def _output_of(self, text: str) -> str:
        """The output of a command in ``$(...)``; unknown unless it only prints."""
        before, has_doubt, self.variables.has_doubt = len(self.commands), self.variables.has_doubt, False
        with self._captured() as printed, self._deeper(self.variables.arguments):
            self._subshell(parse(text, str(self._script)), may_exit=True)
        is_known = printed or (len(self.commands) == before and not self.variables.has_doubt)
        self.variables.has_doubt = self.variables.has_doubt or has_doubt
        del self.commands[before:]
        first = text.split()[0] if text.split() else ""
        return "".join(printed).rstrip("\n") if is_known else unknown(f"output-of-{first}")


def _success(number: int | None) -> bool | None:
    return None if number is None else number == 0


_SAME_AS = {
    "[": "test", ":": "true", "false": "true", ".": "source", "readarray": "mapfile",
    "break": "return", "continue": "return",
}  # fmt: skip
"""Built-in commands that are followed as another one."""
