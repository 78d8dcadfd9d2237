"""Runs programs in this process or in forks of it, because starting Python and loading torch takes seconds."""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess, Popen
from tempfile import TemporaryFile
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

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


class ForkedPopen(Popen):
    """``Popen`` of ``sys.executable`` and a program or ``-m MODULE``, which run in a fork of this process.

    It has imported torch and this package, which takes a new process 2 s. Ranks that torchrun starts in it are forks,
    too. It also has this process's ``sys.path`` and modules: a test of what a program imports needs ``Popen``.
    """

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:
        cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_ = rest
        new_session = rest[16]
        words = [os.fsdecode(word) for word in args]
        assert words[0] == sys.executable and preexec_fn is None and not pass_fds, words
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        torch.set_num_threads(1)  # otherwise a fork hangs if this process used threads of OpenMP
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # garbage of earlier tests may belong to threads that a fork does not have
            ours = [number for number in (p2cwrite, c2pread, errread) if number != -1]
            _end_as_program(_in_child, words[1:], cwd, env, [p2cread, c2pwrite, errwrite], ours, new_session)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _end_as_program(function: Callable[..., None], *args: Any) -> NoReturn:
    """Call the function and end this process, with the exit status that Python gives a program."""
    status = 1
    try:
        atexit._clear()  # handlers of the tests
        status = multiprocessing.Process(target=function, args=args)._bootstrap()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def _in_child(
    words: list[str],
    cwd: str | Path | None,
    env: dict[str, str] | None,
    streams: Sequence[int],
    others: Sequence[int],
    new_session: bool,
) -> None:
    for number in others:
        os.close(number)
    for number, stream in enumerate(streams):
        if stream != -1:
            os.dup2(stream, number)
            os.set_inheritable(number, True)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if new_session:
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if env is not None:
        os.environ.clear()
        os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
    if cwd is not None:
        os.chdir(cwd)
    while words[0] == "-u":
        del words[0]
    subprocess_handler.Popen = ForkedPopen  # type: ignore[attr-defined]  # ranks of torchrun
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


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
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} if names else {}
    meetings = [meeting | dict(zip(names, (rank, ranks, rank, ranks), strict=bool(names))) for rank in range(ranks)]
    processes: list[ForkedPopen] = []
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        try:
            for variables in meetings:
                environment = {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in variables.items()}
                command_of_rank = [sys.executable, *words]
                processes.append(
                    ForkedPopen(command_of_rank, cwd=cwd, env=os.environ | environment, stdout=out, stderr=errors)
                )
            _wait(processes, seconds)
        finally:
            _end(processes)
        for file in (out, errors):
            file.seek(0)
        status = next((process.returncode for process in processes if process.returncode), 0)
        return CompletedProcess(words, status, out.read(), errors.read())


def _wait(processes: Sequence[Popen], seconds: float) -> None:
    """Wait until all processes have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.returncode for process in processes):
            return
        time.sleep(0.005)


def _end(processes: Sequence[Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 10
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.005)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
