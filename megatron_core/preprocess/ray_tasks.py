"""Tasks of a Ray cluster that write files; those of a worker or machine that dies are submitted again."""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

from megatron_core.errors import ConfigError
from megatron_core.preprocess.pool import WorkerDiedError
from megatron_core.preprocess.report import BAR_SECONDS

# A document on which the worker always dies, for example for lack of memory, must end the run. Lost machines and
# preempted workers rarely hit the same part this often.
MOST_FAILURES = 20


class RayTask(Protocol):
    """A part of the work."""

    @property
    def name(self) -> str:
        """Name of the file or folder that the task writes, a digest of its input."""
        ...

    @property
    def place(self) -> str:
        """Position in the input, for messages."""
        ...


AnyTask = TypeVar("AnyTask", bound=RayTask)


class RayTasks:
    """Tasks of a Ray cluster: the one of RAY_ADDRESS, or a running one, or a new one on this machine.

    Two tasks for each CPU are submitted. Memory of this process: a few hundred bytes for each task. `complete` returns
    the names of the tasks whose files exist; `processes`: CPUs of a new cluster; `most`: largest number of CPUs to use.
    """

    def __init__(self, complete: Callable[[], set[str]], processes: int, most: int | None) -> None:
        if find_spec("ray") is None:
            raise ConfigError("--engine ray needs the package ray, which is not installed; pip install ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray = ray
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError as error:
            if os.environ.get("RAY_ADDRESS"):
                raise ConfigError(f"--engine ray: RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}") from None
            ray.init(address="local", num_cpus=processes, include_dashboard=False, **quiet)
        self._complete = complete
        self._most = most

    def map(
        self,
        function: Callable[[Any, Any], None],
        shared: Any,
        tasks: Sequence[AnyTask],
        finished: Callable[[AnyTask | None], None],
    ) -> Iterator[AnyTask]:
        """Run `function(shared, task)` for the tasks that are not complete; yield all in order as they are complete.

        finished: called for each task when it is complete, and with None while others are awaited. WorkerDiedError:
        workers died 20 times on the same task.
        """
        stored = self._ray.put(shared)
        # No retries by Ray: it would not tell a task on which workers always die from a machine that is lost.
        remote = self._ray.remote(function).options(num_cpus=1, max_retries=0)
        complete = self._complete()
        waiting = deque(task for task in tasks if task.name not in complete)
        running: dict[Any, AnyTask] = {}
        failures: Counter[str] = Counter()
        for task in tasks:
            if task.name in complete:
                finished(task)
        for task in tasks:
            while task.name not in complete:
                while waiting and len(running) < self._tasks():
                    following = waiting.popleft()
                    running[remote.remote(stored, following)] = following
                ready, _ = self._ray.wait(list(running), timeout=BAR_SECONDS)
                for reference in ready:
                    done = running.pop(reference)
                    if self._is_complete(reference, done, failures):
                        complete.add(done.name)
                        finished(done)
                    else:
                        waiting.appendleft(done)
                finished(None)
            yield task

    def _tasks(self) -> int:
        """Number of tasks that may be submitted; a cluster may grow and shrink."""
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        return 2 * min(cores, self._most or cores)

    def _is_complete(self, reference: Any, task: RayTask, failures: Counter[str]) -> bool:
        """Whether a task has written its files; False if its worker or machine died."""
        try:
            self._ray.get(reference)
            return True
        except self._ray.exceptions.RayTaskError as error:  # an exception in the task
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            failures[task.name] += 1
            if failures[task.name] >= MOST_FAILURES:
                raise WorkerDiedError(
                    f"workers died {MOST_FAILURES} times on {task.place} on, the last time because of "
                    f"{type(error).__name__}: {str(error).splitlines()[0]}; finished parts are kept, and the same "
                    "command continues"
                ) from None
            time.sleep(0.1)  # a lost machine fails all its tasks at once
            return False

    def stop(self) -> None:
        """Cancel all tasks and disconnect from the cluster."""
        self._ray.shutdown()
