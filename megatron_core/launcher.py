"""Ranks under Slurm's srun and MPI's mpirun, which do not set the variables of torchrun."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping
from typing import NamedTuple

from megatron_core.errors import LayoutError

START_HINT = (
    "start the ranks with torchrun, which sets it, or unset all of RANK, WORLD_SIZE and LOCAL_RANK for one rank"
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


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


def read_integer(name: str, default: int, least: int = 0) -> int:
    """Return the integer of an environment variable of a launcher.

    Errors: ``LayoutError`` if its value is not an integer >= ``least``.
    """
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise LayoutError(f"{name}={text!r} in the environment must be an integer >= {least}; {START_HINT}")
    return int(text)


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
        here = _on_this_machine(environment, launcher)
        if here is not None:
            environment["LOCAL_WORLD_SIZE"] = str(here)
        address, port = _meeting_point(environment, launcher, is_alone=here == int(size))
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
    for part in environment.get(launcher.local_size, "").split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
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
