"""Follows a shell script without running it, and returns the programs that it would start."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_core.errors import ConfigError
from megatron_core.shell import tree
from megatron_core.shell.assignment import assign_word
from megatron_core.shell.built_ins import BuiltIns, Jump, ReturnStatus, lines_of
from megatron_core.shell.conditions import holds, known
from megatron_core.shell.expansion import Value, Variables, size_of
from megatron_core.shell.files import find_script, readable_folders
from megatron_core.shell.launchers import directives, slurm_variables
from megatron_core.shell.patterns import MOST_ROUNDS
from megatron_core.shell.programs import printed
from megatron_core.shell.state import SOURCE, temporarily
from megatron_core.shell.syntax import parse_script
from megatron_core.shell.tokens import ASSIGNMENT
from megatron_core.shell.unknown import UNKNOWN, unknown
from megatron_core.text_file import read_text

MOST_STEPS = 100_000
"""Maximum number of commands that are followed."""
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")


@dataclass
class Interpreter(BuiltIns):
    """Follows commands; conditions that cannot be known count as false and are in ``notes``."""

    commands: list[tree.Command] = field(default_factory=list)
    """All programs, in their order."""
    _steps: int = 0
    _started: tuple[tuple[Path, list[str]], ...] = ()
    """The scripts that are followed as programs of their own, each with its arguments."""

    @classmethod
    def of(
        cls, text: str, script: str, arguments: Sequence[str], values: Mapping[str, Value], folders: Sequence[str] = ()
    ) -> "Interpreter":
        """Follow a script with its arguments and variables of the environment.

        ``folders``: further folders whose scripts may be read. Errors: ``ConfigError`` for wrong syntax, and for a
        script that is too large or takes too long.
        """
        environment: dict[str, Value] = {**slurm_variables(directives(text)), **values}
        known_values = {SOURCE: script, "IFS": " \t\n"} | environment
        interpreter = cls(
            Variables(list(arguments), known_values, script, exported=set(environment)),
            _script=Path(script),
            _folders=readable_folders(Path(script), folders),
            _launcher=tuple(directives(text)),
            _started=((Path(script).resolve(), list(arguments)),),
        )
        interpreter.variables.output_of = interpreter._output_of
        try:
            interpreter.run(parse_script(text, script))
        except Jump:  # ``exit`` or ``return``: the script ends here
            pass
        except RecursionError:
            raise ConfigError(f"{script} is nested too deeply; only simple scripts can be read") from None
        except ConfigError:
            raise
        except ValueError:  # a number with more digits than Python converts
            raise ConfigError(f"{script} has a number of too many digits; correct it") from None
        return interpreter

    def run(self, node: tree.Node) -> bool | None:
        """Follow a command; its success, or None if it cannot be known."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ConfigError(f"{self._script} has more than {MOST_STEPS} steps; give its launch command instead")
        match node:
            case tree.CommandList(commands=commands):
                status: bool | None = True
                for command in commands:
                    status = self.run(command)
                return status
            case tree.Simple() | tree.Test() | tree.Arithmetic():
                return self._leaf(node)
            case tree.Redirected():
                return self._redirected(node)
            case tree.Subshell(body=body, may_exit=may_exit):
                return self._subshell(body, may_exit)
            case tree.Chain(links=links):
                status = True
                for operator, command in links:
                    # A program is assumed to succeed.
                    if (status is not False) == (operator == "&&"):
                        status = self.run(command)
                return status
            case tree.Pipe():
                return self._pipe(node)
            case tree.If() | tree.Case():
                return self._branch(node)
            case tree.For() | tree.While():
                return self._loop(node)
            case tree.Function(name=name, body=body):
                self._functions[name] = body, self.variables.values.get(SOURCE, "")
                return True

    def _leaf(self, node: tree.Simple | tree.Test | tree.Arithmetic) -> bool | None:
        """Follow a command without other ones, and set ``$?``."""
        try:
            match node:
                case tree.Simple():
                    status = self._simple(node)
                case tree.Test(words=words):
                    status = holds(words, self.variables, is_double=True)
                case tree.Arithmetic(text=text):
                    value = self.variables.arithmetic(text)
                    status = None if UNKNOWN.search(value) else value != "0"
            self.variables.status = None if status is None else int(not status)
        except ReturnStatus as end:
            status = _success(end.number)
            self.variables.status = end.number
        return status

    def _pipe(self, node: tree.Pipe) -> bool | None:
        """Follow the parts of a pipeline, each in a subshell that reads the output of the one before."""
        status = None
        *earlier, final = node.stages
        with temporarily(self, _input=self._input):
            for stage in earlier:
                with self._captured() as output:
                    self._subshell(stage, may_exit=False)
                self._input = lines_of("".join(output)) if output else None
            status = self._subshell(final, may_exit=False) if earlier else self.run(final)
        if node.negated and status is not None:
            self.variables.status = int(status)
            return not status
        return status

    def _subshell(self, body: tree.Node, may_exit: bool) -> bool | None:
        with self._isolated():
            self._may_exit = self._may_exit or may_exit
            try:
                return self.run(body)
            except Jump as end:
                if end.command in ("exit", "return"):
                    self.variables.status = end.number
                return _success(end.number)

    def _redirected(self, node: tree.Redirected) -> bool | None:
        lines = self._input if node.document is None else lines_of(self.variables.document(node.document))
        with temporarily(self, _input=lines):
            if not node.is_silent:
                return self.run(node.body)
            with self._captured() as output:
                status = self.run(node.body)
        if node.file is not None:
            self._write(self.variables.text(node.file), "".join(output), node.appends)
        return status

    def _branch(self, node: tree.If | tree.Case) -> bool | None:
        before = self.variables.has_doubt
        self.variables.has_doubt = False
        bodies = [branch[1] for branch in node.branches] + ([node.otherwise] if isinstance(node, tree.If) else [])
        chosen = self._chosen(node)
        has_doubt = self.variables.has_doubt
        unchosen = tuple(body for index, body in enumerate(bodies) if index not in chosen)
        skipped = {match[1] for word in tree.words_in(unchosen) if (match := ASSIGNMENT.match(word))}
        (self.variables.doubtful if has_doubt else self.variables.skipped).update(skipped)
        status: bool | None = True
        try:
            for index in chosen:
                status = self.run(bodies[index])
            return status
        finally:
            self.variables.has_doubt = before or has_doubt

    def _chosen(self, node: tree.If | tree.Case) -> list[int]:
        """Indices of the branches that are followed; that of ``else`` is the number of branches."""
        if isinstance(node, tree.If):
            holds = (self._holds(self.run(condition), node.line) for condition, _ in node.branches)
            index = next((index for index, is_true in enumerate(holds) if is_true), len(node.branches))
            return [index] if index < len(node.branches) or node.otherwise.commands else []
        text = self.variables.text(node.word)
        word = known(text) or ""
        self.variables.has_doubt = UNKNOWN.search(text) is not None
        continues = False
        chosen = list[int]()
        for index, (patterns, _, end) in enumerate(node.branches):
            if continues or any(self._matches(word, pattern) for pattern in patterns):
                chosen.append(index)
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

    def _loop(self, node: tree.For | tree.While) -> bool | None:
        if isinstance(node, tree.For):
            for value in self.variables.all_fields(node.words)[:MOST_ROUNDS]:
                self.variables.assign(node.name, value)
                if not self._round(node.body):
                    break
            return True
        for _ in range(MOST_ROUNDS):
            status = self.run(node.condition)
            if status is None or status == node.until or not self._round(node.body):
                break
        return True

    def _round(self, body: tree.CommandList) -> bool:
        """Follow the body of a loop once; whether the loop continues."""
        try:
            self.run(body)
        except Jump as end:
            if end.command not in ("break", "continue"):
                raise
            if (end.number or 1) > 1:
                raise Jump(end.command, (end.number or 1) - 1) from None
            return end.command == "continue"
        return True

    # --- one command

    def _simple(self, node: tree.Simple) -> bool | None:
        words = list(node.words)
        before = dict[str, Value | None]()
        while words and (match := ASSIGNMENT.match(words[0])):
            before.setdefault(match[1], self.variables.values.get(match[1]))
            assign_word(self.variables, words.pop(0), str(self._script))
        if not words:
            return True
        exported = before.keys() - self.variables.exported
        self.variables.exported |= exported
        try:
            with self.variables.restored(before):
                return self._command(words, node)
        finally:
            self.variables.exported -= exported

    def _command(self, words: list[str], node: tree.Simple) -> bool | None:
        if words[0] in ("export", "declare", "typeset", "local", "readonly"):
            return self._declare(words)
        fields = self.variables.all_fields(words)
        while fields and fields[0] in ("exec", "time", "nohup", "command", "builtin", "sudo"):
            fields = fields[1:]
        if not fields:
            return True
        name = _SAME_AS.get(fields[0], fields[0])
        if name in ("eval", "source", "exit"):
            return {"eval": self._eval, "source": self._source, "exit": self._exit}[name](fields, node)
        if fields[0] in self._functions:
            return self._call(fields)
        built_in: Callable[[list[str]], bool | None] | None = getattr(self, f"_do_{name}", None)
        return built_in(fields) if built_in is not None else self._program(fields, node)

    def _call(self, words: list[str]) -> bool | None:
        body, source = self._functions[words[0]]
        self._locals.append({SOURCE: self.variables.values.get(SOURCE)})
        self.variables.values[SOURCE] = source
        with self.variables.restored(self._locals[-1]), self._deeper(words[1:]):
            try:
                return self.run(body)
            except Jump as end:
                if end.command != "return":
                    raise
                raise ReturnStatus(end.number) from None
            finally:
                self._locals.pop()

    def _program(self, words: list[str], node: tree.Simple) -> bool | None:
        self.variables.spend(size_of(words))
        self.commands.append(self._command_of(words, self._line or node.line))
        shell = next((index for index, word in enumerate(words) if word in (*_SHELLS, "sbatch")), None)
        if shell is None:
            self._print(printed(words, f"output-of-{words[0]}") + "\n")
            return None
        arguments = words[shell + 1 :]
        text = next((i for i, word in enumerate(arguments[:-1]) if re.fullmatch(r"-\w*c", word)), None)
        files = [i for i, word in enumerate(arguments) if word.endswith((".sh", ".slurm", ".sbatch"))]
        with self._child(words[: shell + 1 + (files[0] if files and words[shell] == "sbatch" else 0)]):
            if text is not None:
                self.variables.name = arguments[text + 2] if len(arguments) > text + 2 else self.variables.name
                return self._text(arguments[text + 1], node, arguments[text + 3 :])
            if files:
                return self._follow(arguments[files[0]], arguments[files[0] + 1 :], by=words[shell])
            lines, self._input = self._input, []
            return self._text("".join(lines), node, []) if lines else None

    def _nested(self, text: str, script: str, arguments: list[str]) -> bool | None:
        with self._deeper(arguments):
            return self.run(parse_script(text, script))

    def _follow(self, name: str, arguments: list[str], by: str = "") -> bool | None:
        """Follow another script if it is on this machine; ``by``: the shell, or sbatch, that starts it as a program."""
        path, note = find_script(self._script, name, self._folders)
        if note:
            self.notes.setdefault(note)
        if path is None:
            self.variables.has_absent_scripts = True
            return None
        started = self._started
        program = self.variables.name
        if by:
            if (path.resolve(), arguments) in started:  # a job that submits its successor
                self.notes.setdefault(f"{path} starts itself, and is followed once")
                return None
            started = (*started, (path.resolve(), arguments))
            program = str(path)
        try:
            with (
                temporarily(self, _script=path, _started=started),
                temporarily(self.variables, name=program),
                self.variables.restored({SOURCE: self.variables.values.get(SOURCE)}),
            ):
                self.variables.values[SOURCE] = str(path)
                text = read_text(path)
                if by == "sbatch":
                    self._read_directives(text)
                return self._nested(text, str(path), arguments)
        except Jump as end:
            if end.command != "return":
                raise
            return _success(end.number)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    # --- other scripts and the end of one

    def _eval(self, words: list[str], node: tree.Simple) -> bool | None:
        if any(map(UNKNOWN.search, words)):  # which may assign any variable
            self.variables.has_absent_scripts = True
        return self._text(" ".join(words[1:]), node, self.variables.arguments)

    def _text(self, text: str, node: tree.Simple, arguments: list[str]) -> bool | None:
        """Follow commands in a word of the script."""
        with temporarily(self, _line=self._line or node.line):
            return self._nested(text, str(self._script), arguments)

    def _source(self, words: list[str], node: tree.Simple) -> bool | None:
        return self._follow(words[1], words[2:] or self.variables.arguments) if len(words) > 1 else None

    def _exit(self, words: list[str], node: tree.Simple) -> bool:
        if self._may_exit:
            return self._do_return(words)
        if not self.commands:  # a check of the machine or of the arguments; the launch follows
            self.notes.setdefault(f"{self._script} line {node.line}: {words[0]} is ignored")
        return True

    def _output_of(self, text: str) -> str:
        """The output of a command in ``$(...)``; unknown unless it only prints."""
        before = len(self.commands)
        has_doubt = self.variables.has_doubt
        self.variables.has_doubt = False
        with self._captured() as printed, self._deeper(self.variables.arguments):
            self._subshell(parse_script(text, str(self._script)), may_exit=True)
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
