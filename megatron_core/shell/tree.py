"""Commands of a shell script as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass


@dataclass(frozen=True)
class Simple:
    """Assignments, or a program with its arguments."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Document:
    """Text on the standard input of a command."""

    text: str
    source: str
    """document: here-document, literal: the same without expansions, word: here-string, command: ``<(command)``."""


@dataclass(frozen=True)
class Redirected:
    """A command with its standard input; ``is_silent``: its output goes to a file or another descriptor."""

    body: Node
    document: Document | None
    is_silent: bool
    file: str | None = None
    """Word with the name of the file that gets its output."""
    appends: bool = False


@dataclass(frozen=True)
class Subshell:
    """``( ... )``, or a command with ``&``: what it sets does not persist; ``may_exit``: whether ``exit`` ends it."""

    body: Node
    may_exit: bool = True


@dataclass(frozen=True)
class Test:
    """``[[ ... ]]``."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Arithmetic:
    """``(( ... ))``."""

    text: str
    line: int


@dataclass(frozen=True)
class Chain:
    """Commands connected by ``&&`` and ``||``; the first one has the operator ``&&``."""

    links: tuple[tuple[str, Node], ...]


@dataclass(frozen=True)
class Pipe:
    """Commands connected by ``|``; ``negated`` by a leading ``!``."""

    stages: tuple[Node, ...]
    negated: bool = False


@dataclass(frozen=True)
class If:
    """``if``: conditions with their commands, and the commands of ``else``."""

    branches: tuple[tuple[Block, Block], ...]
    otherwise: Block
    line: int


@dataclass(frozen=True)
class For:
    """``for name in words``; without ``in``, the arguments."""

    name: str
    words: tuple[str, ...]
    body: Block
    line: int


@dataclass(frozen=True)
class While:
    """``while`` and ``until``."""

    condition: Block
    body: Block
    until: bool
    line: int


@dataclass(frozen=True)
class Case:
    """``case``: patterns with their commands, and the operator that ends them: ``;;``, ``;&`` or ``;;&``."""

    word: str
    branches: tuple[tuple[tuple[str, ...], Block, str], ...]
    line: int


@dataclass(frozen=True)
class Function:
    """Definition of a function."""

    name: str
    body: Block


@dataclass(frozen=True)
class Block:
    """Commands in their order."""

    commands: tuple[Node, ...] = ()


Node = Simple | Redirected | Subshell | Test | Arithmetic | Chain | Pipe | If | For | While | Case | Function | Block


def words_of(node: object) -> Iterator[str]:
    """The words of all commands in a part of a tree."""
    if isinstance(node, Simple):
        yield from node.words
    elif isinstance(node, For):
        yield f"{node.name}="
        yield from words_of(node.body)
    elif isinstance(node, tuple):
        for child in node:
            yield from words_of(child)
    elif is_dataclass(node):
        for child in fields(node):
            yield from words_of(getattr(node, child.name))


@dataclass(frozen=True)
class Command:
    """A program that a script would start, with its arguments."""

    words: tuple[str, ...]
    script: str
    line: int
    launcher: tuple[str, ...] = ()
    """Launchers of the shell that starts it, with their flags, such as ``srun --ntasks=8`` before ``bash -c``."""
    deepspeed: str | None = None
    """Text of the JSON file in --deepspeed_config when it starts; None if it is not known."""
    closed: tuple[str, ...] = ()
    """Files of settings in its flags that may not be read."""
