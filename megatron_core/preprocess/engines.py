"""Who writes the parts of a run: this machine, a Ray cluster, or other processes that were started with --partition."""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from megatron_core.errors import ConfigError, DataError
from megatron_core.preprocess.output import TokenOutput
from megatron_core.preprocess.parts import PartFolder
from megatron_core.preprocess.plan import InputPart
from megatron_core.preprocess.pool import WorkerDiedError, WorkerPool
from megatron_core.preprocess.report import BAR_SECONDS, JobProgress
from megatron_core.preprocess.settings import Limits, PreprocessSettings
from megatron_core.preprocess.worker import EncodedPart, TokenFormat, Worker
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.fast import Backend, load_backend

# A document on which the worker always dies, for example for lack of memory, must end the run. Lost machines and
# preempted workers rarely hit the same part this often.
MOST_FAILURES = 20

Finished = Callable[[InputPart | None], None]
"""Called for each part when it is complete, and with None while others are awaited."""


class Engine(Protocol):
    """Makes parts complete."""

    def map(self, shards: Sequence[InputPart], finished: Finished) -> Iterator[InputPart]:
        """Yield the parts in order, each when it is complete."""
        ...

    def stop(self) -> None:
        """Stop all work immediately."""
        ...


class WrittenParts:
    """The engine of --join-partitions, which writes nothing. DataError: parts are missing."""

    def __init__(self, folder: PartFolder) -> None:
        self._folder = folder

    def map(self, shards: Sequence[InputPart], finished: Finished) -> Iterator[InputPart]:
        """Yield the parts."""
        complete = self._folder.finished()
        missing = [shard for shard in shards if shard.name not in complete]
        if missing:
            first = missing[0]
            path = next(iter(first.sources.values())).path
            raise DataError(
                f"{self._folder.path} has {len(shards) - len(missing):,} of {len(shards):,} parts; the first missing "
                f"one is of {path}, byte {first.ranges[0].start:,}: run the --partition commands again with the same "
                "flags and input (they skip finished parts), and then this one"
            )
        for shard in shards:
            finished(shard)
            yield shard

    def stop(self) -> None:
        """Nothing runs."""


class RayParts:
    """Tasks of a Ray cluster: the one of RAY_ADDRESS, or a running one, or a new one on this machine.

    Two tasks for each CPU are submitted; a task of a worker or machine that dies is submitted again. Memory of this
    process: a few hundred bytes for each part.
    """

    def __init__(self, settings: PreprocessSettings, limits: Limits, worker: Worker, folder: PartFolder) -> None:
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
            ray.init(address="local", num_cpus=settings.processes, include_dashboard=False, **quiet)
        # The workers must use the backend that this process has compared with the tokenizer.
        chosen: Any = worker.backend.name
        settings = replace(settings, tokenization_backend=chosen)
        self._shared = ray.put((settings, limits, worker.tokenizer.fingerprint(), worker.layout))
        # No retries by Ray: it would not tell a part on which workers always die from a machine that is lost.
        self._task = ray.remote(write_part).options(num_cpus=1, max_retries=0)
        self._most = settings.workers
        self._folder = folder

    def map(self, shards: Sequence[InputPart], finished: Finished) -> Iterator[InputPart]:
        """Yield the parts. WorkerDiedError: workers died 20 times on the same part."""
        complete = self._folder.finished()
        waiting = deque(shard for shard in shards if shard.name not in complete)
        running: dict[Any, InputPart] = {}
        failures: Counter[str] = Counter()
        for shard in shards:
            if shard.name in complete:
                finished(shard)
        for shard in shards:
            while shard.name not in complete:
                while waiting and len(running) < self._tasks():
                    following = waiting.popleft()
                    running[self._task.remote(self._shared, following)] = following
                ready, _ = self._ray.wait(list(running), timeout=BAR_SECONDS)
                for reference in ready:
                    done = running.pop(reference)
                    if self._is_complete(reference, done, failures):
                        complete.add(done.name)
                        finished(done)
                    else:
                        waiting.appendleft(done)
                finished(None)
            yield shard

    def _tasks(self) -> int:
        """Number of tasks that may be submitted; a cluster may grow and shrink."""
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        return 2 * min(cores, self._most or cores)

    def _is_complete(self, reference: Any, shard: InputPart, failures: Counter[str]) -> bool:
        """Whether a task has written its part; False if its worker or machine died."""
        try:
            self._ray.get(reference)
            return True
        except self._ray.exceptions.RayTaskError as error:  # an exception in the task
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            failures[shard.name] += 1
            if failures[shard.name] >= MOST_FAILURES:
                first = shard.ranges[0]
                raise WorkerDiedError(
                    f"workers died {MOST_FAILURES} times on {shard.sources[first.source].path}, byte {first.start:,} "
                    f"on, the last time because of {type(error).__name__}: {str(error).splitlines()[0]}; finished "
                    "parts are kept, and the same command continues"
                ) from None
            time.sleep(0.1)  # a lost machine fails all its tasks at once
            return False

    def stop(self) -> None:
        """Cancel all tasks and disconnect from the cluster."""
        self._ray.shutdown()


class PartsInOrder:
    """The content of all parts in the order of the input, read as they become complete; shows the progress.

    A part is removed when its tokens are in the output and the progress is saved, unless parts are kept.
    """

    def __init__(
        self,
        settings: PreprocessSettings,
        limits: Limits,
        worker: Worker,
        shards: Sequence[InputPart],
        output: TokenOutput,
    ) -> None:
        self._parts = shards
        self._output = output
        self._keep = settings.keep_parts
        self._folder = PartFolder(settings)
        self._removable: deque[InputPart] = deque()
        self._current: InputPart | None = None
        complete = self._folder.finished()
        left = sum(shard.size for shard in shards)
        already = sum(shard.size for shard in shards if shard.name in complete)
        self._done = output.done
        self._progress = JobProgress(self._done + left, self._done + already, settings.log_interval)
        if settings.join_partitions:
            self._engine: Engine = WrittenParts(self._folder)
        else:
            self._engine = RayParts(settings, limits, worker, self._folder)

    def results(self) -> Iterator[Iterator[EncodedPart]]:
        """Yield the content of each part; call `appended` when it is in the output."""
        for shard in self._engine.map(self._parts, self._finished):
            self._current = shard
            yield self._folder.read(shard)

    def appended(self) -> None:
        """Note that the last result is in the output."""
        assert self._current is not None, "a result has been read"
        self._output.note_part(self._current)
        self._removable.append(self._current)
        while not self._keep and self._removable and self._output.saved == self._output.state.position:
            self._folder.remove(self._removable.popleft())

    def stop(self) -> None:
        """Stop the engine and close the progress."""
        self._engine.stop()
        self._progress.close()

    def _finished(self, shard: InputPart | None) -> None:
        self._done += shard.size if shard else 0
        self._progress.update(self._done, self._output.state.documents, self._output.tokens)


def write_partition(settings: PreprocessSettings, limits: Limits, worker: Worker, shards: Sequence[InputPart]) -> None:
    """Write parts with the processes of this machine, except complete ones; print how many there are."""
    folder = PartFolder(settings)
    complete = folder.finished()
    progress = JobProgress(sum(shard.size for shard in shards), 0, settings.log_interval)
    pool = WorkerPool(settings.processes, lambda shard: folder.write(shard, replace(worker, sources=shard.sources)))
    left = [shard for shard in shards if shard.name not in complete]
    done = sum(shard.size for shard in shards) - sum(shard.size for shard in left)
    try:
        # The results are in the order of the tasks.
        for shard, _ in zip(left, pool.map(left), strict=True):
            done += shard.size
            progress.update(done, 0, 0)
    finally:
        pool.stop()
        progress.close()
    print(
        f"{folder.path}: {len(shards):,} parts of --partition {settings.partition}, {len(left):,} of them written now"
    )


def write_part(shared: tuple[PreprocessSettings, Limits, str, TokenFormat], shard: InputPart) -> None:
    """The task of a worker on any machine."""
    settings, limits, fingerprint, layout = shared
    tokenizer, backend = _tools(settings, fingerprint)
    worker = Worker(settings, shard.sources, limits, Path(), backend, tokenizer, layout)
    PartFolder(settings).write(shard, worker)


@cache
def _tools(settings: PreprocessSettings, fingerprint: str) -> tuple[Tokenizer, Backend]:
    """The tokenizer and its backend, once per process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = settings.tokenizer_files.load()
    if tokenizer.fingerprint() != fingerprint:
        raise DataError(
            f"the files of --tokenizer-model {settings.tokenizer_model} are others on {os.uname().nodename} than where "
            "the command was started; use a file system that all hosts share"
        )
    return tokenizer, load_backend(tokenizer, settings.tokenization_backend)[0]
