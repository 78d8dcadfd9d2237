"""Copies of a run's small files, such as metrics and settings, in the object storage of its checkpoints."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.locations import location
from megatron_core.parallel.texts import raising_on_all_ranks
from megatron_core.storage.paths import StoragePath
from megatron_core.training.callbacks import Callback
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run

PATTERNS = ("*.jsonl", "*.json", "*.yaml", "*.log", "metrics.ranks/*.jsonl")
"""Files in ``CheckpointConfig.run_folder`` that are copied."""
NOT_COPIED = "failures."
"""Beginning of the names of files of which ``FailureLog`` keeps objects of its own."""
VERSIONS = ".stored"
"""File with the version of each object that equals, or is older than, the file here."""


class FetchedFiles(RunPart):
    """On rank 0, copies the files of the run that another machine has stored since this one stored or fetched them, so
    that metrics continue. Errors: ``OSError`` on rank 0 and ``ConfigError`` on the others."""

    def __init__(self, run: Run) -> None:
        copies = _Copies.of(run.config)
        if copies is not None:
            with raising_on_all_ranks(run.world.device):
                if run.world.rank == 0:
                    copies.fetch()


class RunFiles(Callback):
    """After each checkpoint and at the end, rank 0 stores the files on its host that have changed.

    A failure is only printed: the files on this machine are complete.
    """

    priority = 1100  # closed last, after the callbacks that write these files

    def __init__(self, run: Run) -> None:
        is_on = run.world.rank == 0 and not run.config.training.skip_train
        self._copies = _Copies.of(run.config) if is_on else None

    def after_save(self, temporary: bool, saved: bool) -> None:
        """Store changed files after a permanent checkpoint."""
        if not temporary:
            self._store()

    def close(self) -> None:
        """Store changed files at the end, also after a failure."""
        self._store()

    def _store(self) -> None:
        if self._copies is None:
            return
        try:
            self._copies.store()
        except OSError as error:
            print(f"note: files of the run are in {self._copies.folder} only: {error}", flush=True)


class _Copies:
    """The run's folder on this machine and its copy in object storage."""

    def __init__(self, remote: StoragePath, folder: Path) -> None:
        self._remote, self.folder = remote, folder
        self._states: dict[str, tuple[int, int]] = {}
        """Size and time of change of each file when this process stored it."""

    @classmethod
    def of(cls, config: RunConfig) -> "_Copies | None":
        """The places of a run, or None if ``save`` is not in object storage."""
        save, folder = config.checkpoint.save, config.checkpoint.run_folder
        remote: object = None if save is None else location(save)
        return cls(remote, folder) if isinstance(remote, StoragePath) and folder is not None else None

    def fetch(self) -> None:
        """Copy the objects that are not the version known here: another machine has continued the run."""
        versions = self._versions()
        for name, stored_file in _found(self._remote):
            # Versions, not times: clocks of machines differ.
            version, file = stored_file.version(), self.folder / name
            if versions.get(name) != version or not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(stored_file.read_bytes())
                versions[name] = version
                self._keep(versions)

    def store(self) -> None:
        """Store the files that have changed since this process stored them."""
        versions = self._versions()
        for name, file in _found(self.folder):
            status = file.stat()
            state = (status.st_size, status.st_mtime_ns)
            if self._states.get(name) != state:
                (self._remote / name).write_bytes(file.read_bytes())
                versions[name], self._states[name] = (self._remote / name).version(), state
                self._keep(versions)

    def _versions(self) -> dict[str, str]:
        with suppress(OSError, ValueError):
            content = json.loads((self.folder / VERSIONS).read_text())
            return content if isinstance(content, dict) else {}
        return {}

    def _keep(self, versions: dict[str, str]) -> None:
        (self.folder / VERSIONS).write_text(json.dumps(versions))


def _found(folder: Any) -> Iterator[tuple[str, Any]]:
    """The files to copy in a folder or in object storage, with their names below it."""
    for pattern in PATTERNS:
        above = pattern[: pattern.rfind("/") + 1]
        for path in sorted(folder.glob(pattern)):
            if not path.name.startswith(NOT_COPIED):
                yield above + path.name, path
