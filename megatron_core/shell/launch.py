"""The training program in a launch script or command line, its flags, and the number of its ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_core.errors import ConfigError
from megatron_core.shell.expansion import Value
from megatron_core.shell.interpreter import Interpreter
from megatron_core.shell.limits import limited_time
from megatron_core.shell.tree import Command
from megatron_core.text_file import read_text

LEAST_FLAGS = 3
"""Number of known flags from which a program is a training program."""
_NODES = ("--nnodes", "--nodes", "--num-nodes", "-N")
_PER_NODE = ("--nproc-per-node", "--num-gpus", "--ntasks-per-node", "--npernode", "-ppn", "--gpus-per-node")
_ALL = ("--ntasks", "-n", "-np", "--np")
_TASKS = ("--ntasks-per-node", "--ntasks", "-n")
"""Flags of Slurm for the number of its tasks, which are launchers if they start torchrun."""
_SBATCH = re.compile(r"^#SBATCH[ \t]+(\S+?)(?:[= \t]+([^\s#]\S*))?[ \t]*(?:#.*)?\r?$", re.MULTILINE)
_STARTERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun", "deepspeed", "accelerate.commands.launch")


@dataclass(frozen=True)
class Launch:
    """A start of a training program."""

    program: str
    flags: tuple[str, ...]
    """Its arguments; an unknown value is ``expansion.unknown(name)``."""
    place: str
    """Script and line; empty for a command line."""
    nodes: int | None
    ranks_per_node: int | None
    ranks: int | None
    """Number of ranks; None if the launcher's flags do not give it."""


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
        batch = {key.replace("_", "-"): value for key, value in _SBATCH.findall(text)}
        known: dict[str, Value] = {**_slurm_variables(batch), **values}
        found = Interpreter.of(text, name, arguments, known, folders)
        launches = [launch for each in found.commands if (launch := _launch_of(each, is_flag, batch)) is not None]
    lost = [each for each in found.commands if each.words[0].startswith("--")]
    broken = [
        f"{each.script} line {each.line} begins with {each.words[0]}: the line before lacks a \\" for each in lost
    ]
    notes = tuple(dict.fromkeys([*found.notes, *broken]))
    return LaunchScript(tuple(dict.fromkeys(launches)), notes, tuple(found.variables.unset))


def read_command_line(words: Sequence[str], is_flag: Callable[[str], bool]) -> LaunchScript:
    """The launch of a command line: a launcher, a program and its flags, or flags alone."""
    launch = _launch_of(Command(tuple(words), "", 0), is_flag, {}, least=1)
    return LaunchScript((launch,) if launch else ())


def _launch_of(
    command: Command, is_flag: Callable[[str], bool], batch: Mapping[str, str], least: int = LEAST_FLAGS
) -> Launch | None:
    """The launch by a command; None if it starts no training program."""
    words = command.words
    at = _program_at(words)
    flags = words[at + 1 :]
    if at < 0 and command.script:  # only a command line may be flags alone
        return None
    if sum(map(is_flag, flags)) < least:
        return None
    own = _options(words[:at]) if at >= 0 else {}
    starts_several = any(Path(word).name in _STARTERS for word in words[: max(at, 0)])
    of_batch = {name: value for name, value in batch.items() if not (starts_several and name in _TASKS)}
    given = ((_number(own, names), _number(of_batch, names)) for names in (_NODES, _PER_NODE, _ALL))
    nodes, per_node, everywhere = (first if first is not None else second for first, second in given)
    if everywhere is not None and not starts_several:  # else Slurm's tasks are launchers
        ranks: int | None = everywhere
    else:
        ranks = (nodes or 1) * per_node if per_node is not None else None
    place = f"{command.script} line {command.line}" if command.script else ""
    return Launch(words[at] if at >= 0 else "pretrain_gpt.py", flags, place, nodes, per_node, ranks)


def _program_at(words: Sequence[str]) -> int:
    """Index of the program among ``words``; -1 if they are its flags alone."""
    for at, word in enumerate(words):
        if word.endswith(".py"):
            return at
        if word == "-m" and at + 1 < len(words) and words[at + 1] not in _STARTERS:
            return at + 1
    return -1 if words and words[0].startswith("--") else len(words)


def _options(words: Sequence[str]) -> dict[str, str]:
    """The flags of launchers with their values, with hyphens."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if short := re.fullmatch(r"(-[Nn])(\d+)", word):
            found[short[1]] = short[2]
        elif word.startswith("-"):
            found[flag.replace("_", "-")] = value if equals else following
    return found


def _number(options: Mapping[str, str], names: Sequence[str]) -> int | None:
    """The value of the first of ``names`` that is given and a number; of a range its largest one."""
    values = [re.fullmatch(r"(?:\d+:)?(\d{1,6})", options[name]) for name in names if name in options]
    numbers = [int(value[1]) for value in values if value and int(value[1]) > 0]
    return numbers[0] if numbers else None


def _slurm_variables(batch: Mapping[str, str]) -> dict[str, str]:
    """Variables that Slurm sets for the directives of a script."""
    nodes, per_node, tasks = (_number(batch, names) for names in (_NODES, ("--ntasks-per-node",), _ALL))
    devices = re.search(r"(\d+)$", batch.get("--gpus-per-node", batch.get("--gres", "")))
    if tasks is None and per_node is not None:
        tasks = per_node * (nodes or 1)
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_NTASKS": tasks,
        "SLURM_GPUS_ON_NODE": devices and devices[1],
        "SLURM_GPUS_PER_NODE": devices and devices[1],
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def is_script(name: str) -> bool:
    """Whether ``name`` is a file that is not a Python program."""
    return Path(name).is_file() and not name.endswith(".py")
