"""Start ranks on this machine, and end with the exit status of the first one that failed.

The ranks are forks of this process, which has imported the program: torch is loaded once for all of them. They get the
environment variables that torchrun sets, and like torchrun this process holds their store.

python -m megatron_core.commands.start_ranks NUMBER MODULE FLAGS...
"""

import gc
import importlib
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from megatron_core.command import program
from megatron_core.commands.start import command_name, end_on_interrupt, run_tool
from megatron_core.parallel.exit_status import RESTART

GRACE_SECONDS = 30
"""Time in which the other ranks must end after one has failed; as torchrun's."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are sent on to all ranks."""


class LocalRanks:
    """Processes that are ranks of one job."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        """Process id -> rank."""
        self.failed: tuple[int, int] | None = None
        """Rank and exit status of the first one that failed; a negative status is that of a signal."""

    def fork(self, number: int, port: int) -> bool:
        """Fork ``number`` ranks that meet at ``port``; True in each of them, False in this process."""
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed before the start
            stream.flush()
        gc.freeze()  # a collection in a rank would copy the pages that it shares with the others
        for rank in range(number):
            try:
                pid = os.fork()
            except OSError as error:
                self.kill()
                sys.exit(
                    f"{program()}: rank {rank} of {number} cannot be started ({error.strerror}); start fewer ranks, or "
                    "allow more processes (ulimit -u) and memory"
                )
            if pid == 0:
                os.environ.update(_variables(rank, number, port))
                return True
            self.running[pid] = rank
        return False

    def store(self, server: socket.socket) -> dist.Store:
        """Hold the store of the ranks at ``server``."""
        port = server.getsockname()[1]
        try:
            return dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=server.detach())
        except (RuntimeError, OSError):
            self.kill()
            raise

    def send(self, number: int, _: FrameType | None = None) -> None:
        """Send a signal to all running ranks."""
        for pid in self.running:
            with suppress(ProcessLookupError):  # the signal may arrive after wait has returned the last one's status
                os.kill(pid, number)

    def kill(self, *_: object) -> None:
        """End all running ranks at once."""
        self.send(signal.SIGKILL)

    def suspend(self, *_: object) -> None:
        """After Ctrl-Z, stop all processes of the ranks and this one, until the shell continues this one."""
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in self.running:
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)
            if number == signal.SIGSTOP:
                os.kill(os.getpid(), signal.SIGSTOP)

    def wait(self) -> None:
        """Wait until all ranks have ended; after the first failure the others get SIGTERM, and later SIGKILL."""
        while self.running:
            pid, status = os.wait()
            rank = self.running.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if rank is not None and code and self.failed is None:
                self.failed = rank, code
                self.send(signal.SIGTERM)
                signal.alarm(GRACE_SECONDS)


def _variables(rank: int, number: int, port: int) -> dict[str, str]:
    """Environment variables of a rank."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "ROLE_RANK": rank,
        "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "GROUP_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": number,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": program(), "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def main() -> NoReturn:
    """Import the program, fork the ranks, run the program in each, and wait for them."""
    number, module, *flags = sys.argv[1:]
    sys.argv = [command_name(module.split(".")[-1]), *flags]
    end_on_interrupt()
    tool = importlib.import_module(module).main
    ranks = LocalRanks()
    # Signals that arrive before they can be sent on wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_rank = ranks.fork(int(number), server.getsockname()[1])
        store = None if is_rank else ranks.store(server)  # created after the forks, which would not have its thread
    if is_rank:
        os.setsid()  # Ctrl-C reaches the ranks through the process that waits for them, and only once
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        run_tool(program(), tool)
    signal.signal(signal.SIGALRM, ranks.kill)
    for signal_number in (*FORWARDED, signal.SIGTSTP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, ranks.suspend if signal_number == signal.SIGTSTP else ranks.send)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    ranks.wait()
    del store
    sys.exit(_status(ranks))


def _status(ranks: LocalRanks) -> int:
    if ranks.failed is None:
        return 0
    rank, code = ranks.failed
    names = {known.value: known.name for known in signal.Signals}  # not all real-time signals have one
    how = f"ended with status {code}" if code > 0 else f"was killed by {names.get(-code, f'signal {-code}')}"
    if code == -signal.SIGABRT:
        # torch aborts a rank whose collective of NCCL has failed or exceeded its limit: a restart may help.
        print(f"{program()}: rank {rank} {how}, as by torch if NCCL fails; status {RESTART}", file=sys.stderr)
        return RESTART
    print(f"{program()}: rank {rank} {how}", file=sys.stderr)
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    main()
