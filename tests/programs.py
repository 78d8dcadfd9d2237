"""Runs programs in this process or in forks of it, because starting Python and loading torch takes seconds."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import runpy
import shlex
import shutil
import socket
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import mkdtemp
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[1]
VARIABLES = {
    "python": (),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
}
"""Launcher -> its variables with the rank, the number of ranks, and both on this machine."""


def run_program(path: str, *flags: object, cwd: Path = ROOT) -> CompletedProcess[str]:
    """``python path flags`` in ``cwd``: exit status and output. ``path`` is relative to the repository."""
    arguments, before = [path, *map(str, flags)], Path.cwd()
    status: object = 0
    out, errors = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", arguments), redirect_stdout(out), redirect_stderr(errors):
        os.chdir(cwd)
        try:
            runpy.run_path(str(ROOT / path), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        finally:
            os.chdir(before)
    if isinstance(status, str):
        status = print(status, file=errors) or 1
    return CompletedProcess(arguments, int(status), out.getvalue(), errors.getvalue())


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_ranks_of(command: str, cwd: Path = ROOT, seconds: float = 300) -> CompletedProcess[str]:
    """Run ``python PROGRAM ...``, ``torchrun --nproc-per-node N PROGRAM ...`` or the same with ``-m MODULE``.

    Each rank is a fork of this process with the environment variables that torchrun, or mpirun, sets. If one fails, the
    others are ended, as torchrun does. For tests of the launcher itself and of restarts, use torchrun.
    """
    launcher, *words = shlex.split(command)
    names = VARIABLES[launcher]
    ranks = 1
    while launcher != "python" and (word := words[0]) in {"--nproc-per-node", "--standalone"}:
        ranks = int(words[1]) if word == "--nproc-per-node" else ranks
        del words[: 2 if word == "--nproc-per-node" else 1]
    torch.set_num_threads(1)
    folder = Path(mkdtemp())  # not a TemporaryDirectory, which a rank that runs exit handlers would delete
    files = [folder / "stdout", folder / "stderr"]
    for file in files:
        file.touch()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} if names else {}
    meetings = [meeting | dict(zip(names, (rank, ranks, rank, ranks), strict=bool(names))) for rank in range(ranks)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_run_rank, args=(words, cwd, files, each)) for each in meetings]
    gc.freeze()  # garbage of earlier tests may belong to threads that a fork does not have: no rank may collect it
    try:
        for process in processes:
            process.start()
        gc.unfreeze()
        _wait(processes, seconds)
    finally:
        _end(processes)
        texts = [file.read_text() for file in files]
        shutil.rmtree(folder)
    status = next((process.exitcode for process in processes if process.exitcode), 0)
    return CompletedProcess(words, status, *texts)


def _run_rank(words: list[str], cwd: Path, files: list[Path], meeting: dict[str, object]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update({"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in meeting.items()})
    os.chdir(cwd)
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], str(cwd)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _wait(processes: list[BaseProcess], seconds: float) -> None:
    """Wait until all processes have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + seconds
    while (running := [process.sentinel for process in processes if process.is_alive()]) and not any(
        process.exitcode for process in processes
    ):
        if not wait(running, timeout=max(deadline - time.monotonic(), 0)):
            return
        time.sleep(0.005)  # a program that closes the descriptors that it inherits looks as if it had ended


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
            process.join(10)
            process.kill()
            process.join()
