"""Worker processes of this machine."""

import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from multiprocessing.context import ForkContext
from typing import Any

from megatron_core.errors import DataError

# Tasks per worker: one completed, one running, one queued.
TASKS_EACH = 3

_WORK: list[Callable[[Any], Any]] = []


class WorkerDiedError(DataError):
    """A worker process was killed; the saved progress is kept, and the same command resumes from it."""


class WorkerPool:
    """Processes forked from this one that call `work` on tasks; they inherit all objects that `work` refers to.

    close_in_workers: file descriptors to close in the workers.
    """

    def __init__(self, workers: int, work: Callable[[Any], Any], close_in_workers: tuple[int, ...] = ()) -> None:
        self._workers = workers
        self._context = _Context()
        self._executor = ProcessPoolExecutor(workers, self._context, _start, (work, close_in_workers))

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of the tasks in order; at most `TASKS_EACH` tasks per worker are pending."""
        pending: deque = deque()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns about a fork with threads: numpy's BLAS has threads, but supports fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                for task in tasks:
                    pending.append(self._executor.submit(_run, task))
                    if len(pending) >= TASKS_EACH * self._workers:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a worker process died, perhaps because of insufficient memory; run the same command with fewer "
                "--workers than "
                f"{self._workers}: it continues"
            ) from error

    def stop(self) -> None:
        """Kill the workers immediately, and return when they have exited."""
        for process in self._context.started:
            process.kill()
        self._executor.shutdown()


class _Context(ForkContext):
    """Records the started processes, because the executor has no public attribute for them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Any] = []

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        self.started.append(super().Process(*args, **kwargs))
        return self.started[-1]


def _start(work: Callable[[Any], Any], close: tuple[int, ...]) -> None:
    _WORK[:] = [work]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent stops this process.
    # Use one core per worker: the tokenizers library would use all cores in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for descriptor in close:
        os.close(descriptor)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    return _WORK[0](task)
