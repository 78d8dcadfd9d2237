"""Copies of a run's small files, such as metrics and settings, in the object storage of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from megatron_core.config import RunConfig
from megatron_core.storage import StoragePath, in_storage, location
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run

PATTERNS = ("*.jsonl", "*.json", "*.yaml", "*.log")
"""Files in ``CheckpointConfig.run_folder`` that are copied."""


def fetch_run_files(config: RunConfig) -> None:
    """Copy the files of the run that an earlier job stored, if this machine does not have them, so that metrics
    continue. Call it on one rank of each host. Errors: ``OSError``."""
    remote, folder = _places(config)
    if remote is None or folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in PATTERNS:
        for path in remote.glob(pattern):
            if not (folder / path.name).exists():
                (folder / path.name).write_bytes(path.read_bytes())


class RunFiles(Callback):
    """After each checkpoint and at the end, store the files of this host's ranks that have changed.

    A failure is only printed: the files on this machine are complete.
    """

    priority = 1100  # closed last, after the callbacks that write these files

    def __init__(self, run: Run) -> None:
        self._remote, self._folder = _places(run.config)
        self._is_on = self._remote is not None and run.world.local_rank == 0 and not run.config.training.skip_train
        self._sizes: dict[str, int] = {}

    def after_save(self, temporary: bool, saved: bool) -> None:
        """Store changed files after a permanent checkpoint."""
        if not temporary:
            self._store()

    def close(self) -> None:
        """Store changed files at the end, also after a failure."""
        self._store()

    def _store(self) -> None:
        if not self._is_on or self._remote is None or self._folder is None:
            return
        try:
            for path in sorted({path for pattern in PATTERNS for path in self._folder.glob(pattern)}):
                size = path.stat().st_size
                if self._sizes.get(path.name) != size:
                    (self._remote / path.name).write_bytes(path.read_bytes())
                    self._sizes[path.name] = size
        except OSError as error:
            print(f"note: files of the run are in {self._folder} only: {error}", flush=True)


def _places(config: RunConfig) -> tuple[StoragePath | None, Path | None]:
    """The folder of ``save`` if it is in object storage, and the run's folder on this machine."""
    save = config.checkpoint.save
    return (None if save is None else in_storage(location(save))), config.checkpoint.run_folder
