"""Worker processes and the connections to them."""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_core.datasets.prepare.worker import KNOWN, Failed
from megatron_core.errors import DataError

# A killed process is gone in milliseconds, unless it waits for a disk.
END_SECONDS = 5.0


class WorkerDiedError(DataError):
    """A worker was killed; what the others made is kept for the same command to go on with."""


class Pool:
    """Processes that each answer what is sent to them.

    The first is forked, not started afresh, which would cost a second of imports, and `work` forks the others from it,
    so that what it has loaded is there once for all. They end with it.
    """

    def __init__(self, size: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        context = get_context("fork")
        pairs = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pairs]
        theirs = [connection for _, connection in pairs]
        self._process = context.Process(
            target=_enter, args=(work, theirs, self._connections, os.getpid(), arguments), daemon=True
        )
        # What is imported stays: looking through it for garbage takes 12 ms, and copies its memory in each worker.
        gc.freeze()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads at a fork; those of numpy's BLAS know of it.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        for connection in theirs:
            connection.close()

    def __len__(self) -> int:
        """The number of workers."""
        return len(self._connections)

    def send(self, worker: int, message: Any) -> None:
        """Ask a worker something."""
        try:
            self._connections[worker].send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._reason() from error

    def receive(self, worker: int) -> Any:
        """A worker's answer; its error, if it met one; WorkerDiedError if it died."""
        try:
            answer = self._connections[worker].recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._reason() from error
        if isinstance(answer, Failed):
            raise _error(answer)
        return answer

    def receive_any(self, timeout: float) -> Iterator[tuple[int, Any]]:
        """The answers that are there, and who gave them; waits for the first as long as `timeout` seconds."""
        for connection in wait(self._connections, timeout):
            worker = self._connections.index(connection)
            yield worker, self.receive(worker)

    def dismiss(self) -> None:
        """Let all workers end by themselves: there is nothing left to ask, which they are told by None."""
        for connection in self._connections:
            # Not closed, so that `stop` sees each of them end: until then it holds the lock of the work folder.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.send(None)

    def stop(self) -> None:
        """End all workers, whatever they are doing, and return when they are gone."""
        self._process.kill()
        self._process.join()
        for connection in self._connections:
            # A connection ends when its process, killed with the first one, is gone.
            with suppress(EOFError, OSError):
                while not connection.closed and connection.poll(END_SECONDS):
                    connection.recv()
            connection.close()

    def _reason(self) -> Exception:
        """Why a worker is gone: the error that it, or one that it depends on, has sent; or nobody knows."""
        for connection in self._connections:
            with suppress(EOFError, OSError):
                while connection.poll():
                    if isinstance(answer := connection.recv(), Failed):
                        return _error(answer)
        return WorkerDiedError(
            "a worker process died, perhaps for lack of memory; run the same command with fewer --workers than "
            f"{len(self)}: it goes on where it was"
        )


def _enter(
    work: Callable[..., None],
    theirs: list[Connection],
    ours: list[Connection],
    parent: int,
    arguments: tuple[Any, ...],
) -> None:
    # A connection that stays open on this side would hide that the parent is gone.
    for connection in ours:
        connection.close()
    work(theirs, parent, *arguments)


def _error(failed: Failed) -> Exception:
    kinds = {kind.__name__: kind for kind in KNOWN}
    return kinds.get(failed.kind, RuntimeError)(failed.sentence)
