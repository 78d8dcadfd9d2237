"""The training program in a launch script or command line, its flags, and the number of its ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_core.errors import ConfigError
from megatron_core.shell.files import readable_folders, text_of_settings, values_of
from megatron_core.shell.interpreter import Interpreter
from megatron_core.shell.launchers import ALL, NODES, SEVERAL, from_launcher, number_of, options_of
from megatron_core.shell.limits import limited_time
from megatron_core.shell.tree import Command
from megatron_core.text_file import read_text

LEAST_FLAGS = 3
"""Number of known flags from which a program is a training program."""
_PER_NODE = ("--nproc-per-node", "--num-gpus", "--ntasks-per-node", "--npernode", "-ppn", "--gpus-per-node")
_TASKS = ("--ntasks-per-node", "--ntasks", "-n")
"""Flags of Slurm for the number of its tasks, which are launchers if they start torchrun."""


@dataclass(frozen=True)
class Launch:
    """A start of a training program."""

    program: str
    flags: tuple[str, ...]
    """Its arguments; an unknown value is ``expansion.unknown(name)``."""
    location: str
    """Script and line; empty for a command line."""
    nodes: int | None
    ranks_per_node: int | None
    ranks: int | None
    """Number of ranks; None if the launcher's flags do not give it."""
    deepspeed: str | None = None
    """Text of the JSON file in --deepspeed_config; None if it is not known."""
    closed: tuple[str, ...] = ()
    """Files of settings in its flags that may not be read."""


@dataclass(frozen=True)
class LaunchScript:
    """The launches in a script, and what is not known about them."""

    launches: tuple[Launch, ...]
    notes: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    """Variables that the script reads without setting them."""


def read_script(
    name: str,
    arguments: Sequence[str],
    values: Mapping[str, str],
    is_flag: Callable[[str], bool],
    folders: Sequence[str] = (),
) -> LaunchScript:
    """Follow a script; ``is_flag``: whether a word is a flag of a training program.

    ``folders``: further folders whose scripts may be read. Errors: ``ConfigError`` for a file that cannot be read or
    understood, or takes too long.
    """
    try:
        text = read_text(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    with limited_time(name):
        interpreter = Interpreter.of(text, name, arguments, values, folders)
        launches = [launch for command in interpreter.commands if (launch := _launch_of(command, is_flag)) is not None]
    lost = [command for command in interpreter.commands if command.words[0].startswith("--")]
    broken = [
        f"{command.script} line {command.line} begins with {command.words[0]}: the line before lacks a \\"
        for command in lost
    ]
    notes = tuple(dict.fromkeys([*interpreter.notes, *broken]))
    return LaunchScript(tuple(dict.fromkeys(launches)), notes, tuple(interpreter.variables.unset))


def read_command_line(words: Sequence[str], is_flag: Callable[[str], bool]) -> LaunchScript:
    """The launch of a command line: a launcher, a program and its flags, or flags alone."""
    script = Path("command line")
    names = values_of(words, "deepspeed-config")
    text = text_of_settings(script, names[-1], readable_folders(script)) if names else None
    launch = _launch_of(Command(tuple(words), "", 0, deepspeed=text), is_flag, least=1)
    return LaunchScript((launch,) if launch else ())


def _launch_of(command: Command, is_flag: Callable[[str], bool], least: int = LEAST_FLAGS) -> Launch | None:
    """The launch by a command; None if it starts no training program."""
    words = command.words
    program = _program_at(words)
    flags = words[program + 1 :]
    if program < 0 and command.script:  # only a command line may be flags alone
        return None
    if sum(map(is_flag, flags)) < least:
        return None
    before = words[: max(program, 0)]
    starts_several = any(Path(word).name in SEVERAL for word in before)
    # srun of a shell and the directives of a script are those of all launches in it.
    outer = options_of(command.launcher)
    if starts_several:
        outer = {name: value for name, value in outer.items() if name not in _TASKS}
    inner = options_of(from_launcher(before))
    numbers = ((number_of(inner, names), number_of(outer, names)) for names in (NODES, _PER_NODE, ALL))
    nodes, per_node, everywhere = (number if number is not None else fallback for number, fallback in numbers)
    if everywhere is not None and not starts_several:  # else Slurm's tasks are launchers
        ranks: int | None = everywhere
    else:
        ranks = (nodes or 1) * per_node if per_node is not None else None
    location = f"{command.script} line {command.line}" if command.script else ""
    return Launch(
        words[program] if program >= 0 else "pretrain_gpt.py",
        flags,
        location,
        nodes,
        per_node,
        ranks,
        command.deepspeed,
        command.closed,
    )


def _program_at(words: Sequence[str]) -> int:
    """Index of the program among ``words``; -1 if they are its flags alone."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index
        if word == "-m" and index + 1 < len(words) and words[index + 1] not in SEVERAL:
            return index + 1
    return -1 if words and words[0].startswith("--") else len(words)


def is_script(name: str) -> bool:
    """Whether ``name`` is a file that is not a Python program."""
    return Path(name).is_file() and not name.endswith(".py")
