"""The variables by which torchrun describes ranks, also under Slurm's srun and MPI's mpirun, which set others."""

import os
import re
import sys
from collections.abc import MutableMapping
from typing import NamedTuple

from megatron_core.errors import LayoutError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
WAY_OUT = "start the ranks with torchrun, which sets it, or unset all of RANK, WORLD_SIZE and LOCAL_RANK for one rank"


class _Launcher(NamedTuple):
    """Names of the variables with a process's rank, their number, and both on its machine."""

    program: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Launcher("mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    # Last, because ranks of mpirun in a job of Slurm inherit the variables of the task that started them.
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
_MPI_PORT = 29500
"""torchrun's default."""


def read_integer(name: str, default: int, least: int = 0, most: int = 10**9 - 1) -> int:
    """Return the value of the environment variable ``name``, or ``default`` if it is not set.

    Errors: ``LayoutError`` for a value that is not an integer from ``least`` to ``most``.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
        limits = f">= {least}" if most == 10**9 - 1 else f"from {least} to {most}"
        way_out = f"; {WAY_OUT}" if name in _TORCHRUN else ""
        raise LayoutError(f"{name}={text[:80]!r} in the environment must be an integer {limits}{way_out}")
    return int(text)


def check_environment() -> None:
    """Raise ``LayoutError`` if a variable of torchrun is set to a value that is not a number, or is out of range."""
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        read_integer(name, least, least)
    read_integer("MASTER_PORT", 0, most=65535)


def describe_one_rank(port: int = _MPI_PORT) -> None:
    """Set torchrun's variables for a single process that has no launcher; those that are set keep their values."""
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**single, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        os.environ.setdefault(name, value)


def read_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables from those of srun or mpirun if several processes were started without torchrun.

    Ranks of srun meet on the first host of the job step, at a port that is computed from the number of the step; ranks
    of mpirun on one machine at port 29500. ``MASTER_ADDR`` and ``MASTER_PORT`` have precedence; ranks of mpirun on
    several machines need ``MASTER_ADDR``.
    """
    if any(name in environment for name in _TORCHRUN):
        return
    for launcher in _LAUNCHERS:
        needed = [environment.get(name, "") for name in (launcher.rank, launcher.size, launcher.local_rank)]
        if not all(text.isascii() and text.isdigit() for text in needed) or int(needed[1]) < 2:
            continue
        rank, size, local_rank = needed
        environment.update({"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank})
        local_size = _on_this_machine(environment, launcher)
        if local_size is not None:
            environment["LOCAL_WORLD_SIZE"] = str(local_size)
        address, port = _meeting_point(environment, launcher, is_alone=local_size == int(size))
        environment.setdefault("MASTER_PORT", str(port))
        if address:
            environment.setdefault("MASTER_ADDR", address)
        if rank == "0":
            where = f"{environment.get('MASTER_ADDR', 'MASTER_ADDR')}:{environment['MASTER_PORT']}"
            print(f"note: {size} ranks, started by {launcher.program}, meet at {where}", file=sys.stderr)
        return


def _on_this_machine(environment: MutableMapping[str, str], launcher: _Launcher) -> int | None:
    """The number of processes on this machine. srun gives those of all machines, such as ``4(x2),3``."""
    counts: list[int] = []
    for entry in environment.get(launcher.local_size, "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", entry)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environment.get("SLURM_NODEID", "0") if launcher.program == "srun" else "0"
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _meeting_point(environment: MutableMapping[str, str], launcher: _Launcher, *, is_alone: bool) -> tuple[str, int]:
    """Address and port of rank 0; the address is empty if it is not known."""
    if launcher.program != "srun":
        return "127.0.0.1" if is_alone else "", _MPI_PORT
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = 7 * int(job) + int(step) if job.isdigit() and step.isdigit() else 0
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    return _first_host(hosts), 15_000 + number % 15_000  # below the ports that the kernel gives to clients


def _first_host(hosts: str) -> str:
    """The first of Slurm's hosts, such as ``node007`` of ``node[007-012,020],other3``."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
