"""State of a shell, and the parts that subshells and functions copy."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError
from megatron_core.shell.expansion import Value, Variables
from megatron_core.shell.launchers import directives, from_launcher, slurm_variables
from megatron_core.shell.tree import CommandList

DEEPEST = 30
"""Maximum nesting of functions and scripts."""
SOURCE = "BASH_SOURCE"


@contextmanager
def temporarily(owner: object, **values: Any) -> Iterator[None]:
    """Set attributes of ``owner``, and restore their previous values at the end."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


@dataclass
class ShellState:
    """Variables, functions, input, output and folder of a shell."""

    variables: Variables
    notes: dict[str, None] = field(default_factory=dict)
    """Parts of the script that could not be followed."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of the files that the script writes, by name."""
    _script: Path = Path()
    _functions: dict[str, tuple[CommandList, Value]] = field(default_factory=dict)
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
        depth = self._depth + 1
        if depth > DEEPEST:
            raise ConfigError(f"{self._script}: functions or scripts are nested deeper than {DEEPEST}")
        with temporarily(self, _depth=depth), temporarily(self.variables, arguments=list(arguments)):
            yield

    @contextmanager
    def _captured(self) -> Iterator[list[str]]:
        output = list[str]()
        with temporarily(self, _output=output):
            yield output

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """A subshell: what commands set in it does not persist."""
        copies = {"_functions": dict(self._functions), "_locals": [dict(variables) for variables in self._locals]}
        unchanged = {name: getattr(self, name) for name in ("_folder", "_may_exit", "_launcher")}
        with temporarily(self, **copies, **unchanged), self.variables.isolated():
            yield

    def _read_directives(self, text: str) -> None:
        """Begin a job that is submitted: it has its own directives, then the flags of sbatch, and nothing of others."""
        submitted = max(index for index, word in enumerate(self._launcher) if word == "sbatch")
        self._launcher = (*directives(text), *self._launcher[submitted:])
        self.variables.values |= slurm_variables(self._launcher)

    @contextmanager
    def _child(self, words: list[str]) -> Iterator[None]:
        """A shell that is started as a program by ``words``: it gets the exported variables."""
        with self._isolated():
            self._launcher += tuple(from_launcher(words))
            names = {*self.variables.exported, SOURCE, "IFS"}
            self.variables.values = {name: value for name, value in self.variables.values.items() if name in names}
            self._functions = {name: value for name, value in self._functions.items() if name in names}
            self._locals = []
            yield
