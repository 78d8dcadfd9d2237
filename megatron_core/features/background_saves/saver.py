"""Writes checkpoints of a run in a thread."""

from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from threading import Event, Thread

from megatron_core.checkpoint import Save, TensorBox
from megatron_core.checkpoint.writer import Agree, run_on_all_ranks, with_fix
from megatron_core.errors import CheckpointError
from megatron_core.features.background_saves.snapshot import Snapshot
from megatron_core.training.saving import CheckpointSaver


class BackgroundSaver(CheckpointSaver):
    """Writes each checkpoint in a thread; at most one is being written.

    This rank's part is copied while the next step runs: the update of this step waits for the copy, and the next save
    for the complete checkpoint.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._snapshot = Snapshot()
        self._running: BackgroundSave | None = None

    def open(self, *, is_new: bool = False) -> None:
        """See ``CheckpointSaver.open``; also start to allocate the host's memory for copies from a GPU."""
        was_open = self._is_open
        super().open(is_new=is_new)
        if not was_open and self.data.device.type == "cuda":
            self._snapshot.reserve(chain(*self.pieces()))

    def _write(self, save: Save, updated: Iterable[TensorBox], changing: Iterable[TensorBox]) -> None:
        seconds = 60.0 * self.config.parallel.distributed_timeout_minutes
        self._running = BackgroundSave(save, self._snapshot.take(updated, changing), self._agree, seconds)
        # The wait is at the update, not here: forward and backward read the weights while the thread copies them.
        self.optimizer.before_update = self._running.wait_until_copied

    def finish(self) -> None:
        """See ``CheckpointSaver.finish``."""
        running, self._running = self._running, None
        if running is not None:
            self._write_other_format(running.finish())

    def join(self, seconds: float) -> bool:
        """See ``CheckpointSaver.join``."""
        return self._running is None or self._running.join(seconds)


class BackgroundSave:
    """A checkpoint that a thread copies and writes while training continues.

    ``snapshot``: this rank's pieces and the function that completes their copies, from ``Snapshot.take``. Call
    ``wait_until_copied`` before changing the tensors. ``seconds``: how long rank 0 waits for another rank's report. All
    ranks construct it together, and call ``finish`` together.
    """

    def __init__(self, save: Save, snapshot: tuple[list[TensorBox], Callable[[], None]], agree: Agree, seconds: float):
        self._save = save
        self._agree = agree
        self._problem = ""
        self._copied = Event()
        run_on_all_ranks(agree, "prepare the folder of a checkpoint", save.prepare if save.rank == 0 else None)
        # A daemon: after an error the process must not wait for a slow disk without a limit (``join``).
        self._thread = Thread(target=self._run, args=(*snapshot, seconds), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, pieces: list[TensorBox], complete: Callable[[], None], seconds: float) -> None:
        try:
            try:
                complete()
            finally:
                # Also after an error: the step waits for this event, and training continues without the checkpoint.
                self._copied.set()
            self._save.write(pieces)
            if self._save.rank == 0:
                self._save.wait_for_reports(seconds)
                self._save.publish()
        except Exception as error:  # even out of memory: the other ranks must be informed
            self._problem = with_fix(error) or type(error).__name__
            if self._save.rank == 0:
                self._save.give_up()
            else:
                self._save.fail(self._problem)

    def wait_until_copied(self) -> None:
        """Wait until this rank may change weights and optimizer state."""
        self._copied.wait()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for this rank's thread; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def finish(self) -> Path:
        """Wait until the checkpoint is complete; returns its folder. Errors: ``CheckpointError`` on all ranks."""
        self.join()

        def tell() -> None:
            if self._problem:
                raise CheckpointError(self._problem)

        run_on_all_ranks(self._agree, f"write its part of a checkpoint to {self._save.folder}", tell)
        return self._save.final
