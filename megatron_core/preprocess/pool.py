"""A pool of worker processes that share memory with this one and end with it."""

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

# Of each worker: one that is done and waits, one that runs, one that is next.
TASKS_EACH = 3

_WORK: list[Callable[[Any], Any]] = []


class WorkerDiedError(DataError):
    """A worker process was killed; what was written before is kept for the same command to continue with."""


class WorkerPool:
    """Processes that are forked from this one, with all that `work` refers to, and call it on tasks.

    close_in_workers: file descriptors that the workers are not to keep open.
    """

    def __init__(self, workers: int, work: Callable[[Any], Any], close_in_workers: tuple[int, ...] = ()) -> None:
        self._workers = workers
        self._context = _Context()
        self._executor = ProcessPoolExecutor(workers, self._context, _start, (work, close_in_workers))

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """The results of the tasks in their order; a few tasks more than there are workers are held at once."""
        pending: deque = deque()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads at a fork: those of numpy's BLAS, which handle it.
                warnings.simplefilter("ignore", DeprecationWarning)
                for task in tasks:
                    pending.append(self._executor.submit(_run, task))
                    if len(pending) >= TASKS_EACH * self._workers:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a worker process died, perhaps for lack of memory; run the same command with fewer --workers than "
                f"{self._workers}: it continues"
            ) from error

    def stop(self) -> None:
        """End the workers at once, whatever they are doing, and return when they are gone."""
        for process in self._context.started:
            process.kill()
        self._executor.shutdown()


class _Context(ForkContext):
    """Remembers the processes that were started, for which the executor has no public name."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Any] = []

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        self.started.append(super().Process(*args, **kwargs))
        return self.started[-1]


def _start(work: Callable[[Any], Any], close: tuple[int, ...]) -> None:
    _WORK[:] = [work]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # This process ends when the parent stops it.
    # A worker keeps to one core: the tokenizers library would use all of them in each.
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
