"""Flags of launchers for the number of ranks, directives of Slurm, and the variables that Slurm sets for them."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

NODES = ("--nnodes", "--nodes", "--num-nodes", "-N")
ALL = ("--ntasks", "-n", "-np", "--np")
SEVERAL = ("torch.distributed.run", "torch.distributed.launch", "torchrun", "deepspeed", "accelerate.commands.launch")
"""Programs that start several ranks in each of their processes."""
_LAUNCHERS = ("sbatch", "salloc", "srun", "mpirun", "mpiexec", "orterun", *SEVERAL)
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(\S+?)(?:[= \t]+([^\s#]\S*))?[ \t]*(?:#.*)?\r?$", re.MULTILINE)


def directives(text: str) -> list[str]:
    """The ``#SBATCH`` lines of a script as words of a command line."""
    return ["sbatch", *(f"{flag}={value}" for flag, value in _DIRECTIVE.findall(text))]


def from_launcher(words: Sequence[str]) -> Sequence[str]:
    """``words`` from the first launcher on: ``-n`` of other programs, such as ``nice``, has another meaning."""
    first = next((index for index, word in enumerate(words) if Path(word).name in _LAUNCHERS), len(words))
    return words[first:]


def options_of(words: Sequence[str]) -> dict[str, str]:
    """The flags of launchers with their values, with hyphens; of a repeated flag the last value."""
    options = {}
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if short := re.fullmatch(r"(-[Nn])(\d+)", word):
            options[short[1]] = short[2]
        elif word.startswith("-"):
            options[flag.replace("_", "-")] = value if equals else following
    return options


def number_of(options: Mapping[str, str], names: Sequence[str]) -> int | None:
    """The value of the first of ``names`` that is given and a number.

    Of a range of nodes such as ``2:4`` it is the largest number, of GPUs with a type, such as ``h100:4``, their number.
    """
    values = [re.fullmatch(r"(?:[\w.-]+:)*(\d{1,6})", options[name]) for name in names if name in options]
    numbers = [int(value[1]) for value in values if value and int(value[1]) > 0]
    return numbers[0] if numbers else None


def slurm_variables(words: Sequence[str]) -> dict[str, str]:
    """Variables that Slurm sets in a job with these directives and options of sbatch."""
    batch = options_of(words)
    nodes, per_node, tasks = (number_of(batch, names) for names in (NODES, ("--ntasks-per-node",), ALL))
    devices = number_of(batch, ("--gpus-per-node", "--gres"))
    if tasks is None and per_node is not None:
        tasks = per_node * (nodes or 1)
    numbers = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_NTASKS": tasks,
        "SLURM_GPUS_ON_NODE": devices,
        "SLURM_GPUS_PER_NODE": devices,
    }
    return {name: str(value) for name, value in numbers.items() if value is not None}
