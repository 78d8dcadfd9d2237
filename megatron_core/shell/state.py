"""State of a shell, and the parts that subshells and functions copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_core.errors import ConfigError
from megatron_core.shell.expansion import Value, Variables
from megatron_core.shell.launchers import directives, from_launcher, variables_of
from megatron_core.shell.tree import Block

DEEPEST = 30
"""Maximum nesting of functions and scripts."""
SOURCE = "BASH_SOURCE"


@dataclass
class State:
    """Variables, functions, input, output and folder of a shell."""

    variables: Variables
    notes: dict[str, None] = field(default_factory=dict)
    """Parts of the script that could not be followed."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of the files that the script writes, by name."""
    _script: Path = Path()
    _functions: dict[str, tuple[Block, Value]] = field(default_factory=dict)
    """Body of each function, and BASH_SOURCE where it is defined."""
    _locals: list[dict[str, Value | None]] = field(default_factory=list)
    """Of each function that is followed, the outer values of its local variables."""
    _output: list[str] | None = None
    """Texts on standard output; None: they are discarded."""
    _input: list[str] | None = None
    """Lines on standard input; None: they are not known."""
    _folders: tuple[Path, ...] = ()
    """Folders whose files may be read."""
    _folder: str = ""
    """Folder after ``cd``; empty: that in which the script would run."""
    _option_place: tuple[str, int] = ("", 0)
    """Value of OPTIND after the last call of getopts, and the place in its argument."""
    _depth: int = 0
    _line: int = 0
    """Line of the script with the commands in a word that are followed; 0: none."""
    _may_exit: bool = False
    """Whether ``exit`` ends the subshell that is followed."""
    _launcher: tuple[str, ...] = ()
    """Words that start the shell that is followed, and directives of its script."""

    def _print(self, text: str) -> None:
        if self._output is not None:
            self.variables.spend(len(text))
            self._output.append(text)

    @contextmanager
    def _deeper(self, arguments: list[str]) -> Iterator[None]:
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
    def _captured(self) -> Iterator[list[str]]:
        before, self._output = self._output, []
        try:
            yield self._output
        finally:
            self._output = before

    @contextmanager
    def _reading(self, lines: list[str] | None) -> Iterator[None]:
        before, self._input = self._input, lines
        try:
            yield
        finally:
            self._input = before

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """A subshell: what commands set in it does not persist."""
        before = self._functions, self._locals, self._folder, self._may_exit, self._launcher
        self._functions, self._locals = dict(self._functions), [dict(each) for each in self._locals]
        try:
            with self.variables.isolated():
                yield
        finally:
            self._functions, self._locals, self._folder, self._may_exit, self._launcher = before

    def _read_directives(self, text: str) -> None:
        """Begin a job that is submitted: it has its own directives, then the flags of sbatch, and nothing of others."""
        submitted = max(at for at, word in enumerate(self._launcher) if word == "sbatch")
        self._launcher = (*directives(text), *self._launcher[submitted:])
        self.variables.values |= variables_of(self._launcher)

    @contextmanager
    def _child(self, words: list[str]) -> Iterator[None]:
        """A shell that is started as a program by ``words``: it gets the exported variables."""
        with self._isolated():
            self._launcher += tuple(from_launcher(words))
            kept = {*self.variables.exported, SOURCE, "IFS"}
            self.variables.values = {name: value for name, value in self.variables.values.items() if name in kept}
            self._functions = {name: value for name, value in self._functions.items() if name in kept}
            self._locals = []
            yield
