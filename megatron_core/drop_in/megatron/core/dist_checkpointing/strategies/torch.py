"""Strategies and requests of saving and loading, and a reader of ``torch.distributed.checkpoint``."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from megatron_core.hub.megatron_lm.pickles import load_metadata


class TorchDistSaveShardedStrategy:
    """A strategy without effect: ``dist_checkpointing.save`` always writes checkpoints of this package."""

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        self.backend, self.version = backend, version


class TorchDistLoadShardedStrategy(TorchDistSaveShardedStrategy):
    """A strategy without effect: ``dist_checkpointing.load`` always reads checkpoints of this package."""


def FullyParallelSaveStrategyWrapper(strategy: Any, parallelization_group: Any = None, *unused: Any) -> Any:
    """Return ``strategy``."""
    return strategy


FullyParallelLoadStrategyWrapper = FullyParallelSaveStrategyWrapper


class CachedMetadataFileSystemReader(FileSystemReader):
    """``FileSystemReader`` whose instances for the same folder share its metadata.

    ``cache_metadata=False`` reads the metadata each time. No code that the file names is run.
    Errors: ``CheckpointError`` for a file that is damaged or names other objects than those of metadata.
    """

    _metadata_cache: ClassVar[dict[str, Metadata]] = {}

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cache_key = os.path.abspath(path) if cache_metadata else None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the folder, or of the rank ``rank``."""
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        if self._cache_key is None:
            return self._read(path)
        key = os.path.join(self._cache_key, path.name)
        if key not in self._metadata_cache:
            self._metadata_cache[key] = self._read(path)
        return self._metadata_cache[key]

    def _read(self, path: Path) -> Metadata:
        metadata: Metadata = load_metadata(path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Forget the metadata of all folders."""
        cls._metadata_cache.clear()


class AsyncRequest(NamedTuple):
    """``async_fn(*async_fn_args, **async_fn_kwargs)`` writes, then ``finalize_fns`` are called on every rank."""

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Any = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to be called after the others; RuntimeError for a frozen request."""
        if self.is_frozen:
            raise RuntimeError("Cannot add finalization functions to a frozen AsyncRequest; add them before")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Write, and call the other functions."""
        if self.preload_fn is not None:
            self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **(self.async_fn_kwargs or {}))
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> "AsyncRequest":
        """Return the request without further changes."""
        return self._replace(is_frozen=True)


class AsyncCallsQueue:
    """Carries out requests when they are scheduled; none is ever unfinished."""

    def __init__(self, persistent: bool = False) -> None:
        self.persistent, self.call_idx = persistent, -1
        self._finished: list[int] = []

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Carry out a request; return its number."""
        self.call_idx += 1
        async_request.execute_sync()
        self._finished.append(self.call_idx)
        return self.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Return the numbers of the requests since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of requests that ``maybe_finalize_async_calls`` has not returned yet."""
        return len(self._finished)

    def close(self, abort: bool = False) -> None:
        """Do nothing: there is no process in the background."""
