"""Who writes the parts of a run: this machine, a Ray cluster, or other processes that were started with --partition."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from megatron_core.errors import DataError
from megatron_core.preprocess.backends import Backend, load_backend
from megatron_core.preprocess.output import TokenOutput
from megatron_core.preprocess.parts import PartFolder
from megatron_core.preprocess.plan import InputPart
from megatron_core.preprocess.pool import WorkerPool
from megatron_core.preprocess.ray_tasks import RayTasks
from megatron_core.preprocess.report import JobProgress
from megatron_core.preprocess.settings import Limits, PreprocessSettings
from megatron_core.preprocess.worker import EncodedPart, TokenFormat, Worker
from megatron_core.tokenizers import Tokenizer

Finished = Callable[[InputPart | None], None]
"""Called for each part when it is complete, and with None while others are awaited."""


class TokenizingEngine(Protocol):
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
            raise DataError(
                f"{self._folder.path} has {len(shards) - len(missing):,} of {len(shards):,} parts; the first missing "
                f"one is of {missing[0].place}: run the --partition commands again with the same "
                "flags and input (they skip finished parts), and then this one"
            )
        for shard in shards:
            finished(shard)
            yield shard

    def stop(self) -> None:
        """Nothing runs."""


class RayParts:
    """Tasks of a Ray cluster that write parts."""

    def __init__(self, settings: PreprocessSettings, limits: Limits, worker: Worker, folder: PartFolder) -> None:
        self._tasks = RayTasks(folder.finished, settings.processes, settings.workers)
        # The workers must use the backend that this process has compared with the tokenizer.
        chosen: Any = worker.backend.name
        settings = replace(settings, tokenization_backend=chosen)
        self._shared = (settings, limits, worker.tokenizer.fingerprint(), worker.layout)

    def map(self, shards: Sequence[InputPart], finished: Finished) -> Iterator[InputPart]:
        """Yield the parts. WorkerDiedError: workers died 20 times on the same part."""
        yield from self._tasks.map(write_part, self._shared, shards, finished)

    def stop(self) -> None:
        """Cancel all tasks and disconnect from the cluster."""
        self._tasks.stop()


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
            self._engine: TokenizingEngine = WrittenParts(self._folder)
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
