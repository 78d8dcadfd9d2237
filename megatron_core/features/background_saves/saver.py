"""Writes checkpoints of a run in a thread."""

from collections.abc import Callable, Iterable
from itertools import chain
from threading import Event, Thread

from megatron_core.checkpoint import Save, TensorBox
from megatron_core.checkpoint.writer import run_on_all_ranks, with_fix
from megatron_core.errors import CheckpointError
from megatron_core.features.background_saves.snapshot import Snapshot
from megatron_core.training.saving import CheckpointSaver


class BackgroundSaver(CheckpointSaver):
    """Copies and writes each checkpoint in a thread while training continues; at most one is being written.

    This rank's part is copied while the next step runs: the update of this step waits for the copy, and the next save
    for the complete checkpoint.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._snapshot = Snapshot()
        self._copied = Event()
        self._problem = ""
        self._running: tuple[Save, Thread] | None = None

    def open(self, *, is_new: bool = False) -> None:
        """See ``CheckpointSaver.open``; also start to allocate the host's memory for copies from a GPU."""
        was_open = self._is_open
        super().open(is_new=is_new)
        if not was_open and self.data.device.type == "cuda":
            self._snapshot.reserve(chain(*self.pieces()))

    def _write(self, save: Save, updated: Iterable[TensorBox], changing: Iterable[TensorBox]) -> None:
        copies, complete = self._snapshot.take(updated, changing)
        run_on_all_ranks(self._agree, "prepare the folder of a checkpoint", save.prepare if save.rank == 0 else None)
        self._copied.clear()
        self._problem = ""
        # A daemon: after an error the process must not wait for a slow disk without a limit (``join``).
        thread = Thread(target=self._copy_and_write, args=(save, copies, complete), name="checkpoint", daemon=True)
        self._running = save, thread
        thread.start()
        # The wait is at the update, not here: forward and backward read the weights while the thread copies them.
        self.optimizer.before_update = self._wait_until_copied

    def _copy_and_write(self, save: Save, pieces: list[TensorBox], complete: Callable[[], None]) -> None:
        try:
            try:
                complete()
            finally:
                # Also after an error: the step waits for this event, and training continues without the checkpoint.
                self._copied.set()
            save.write(pieces)
            if save.rank == 0:
                save.wait_for_reports(60.0 * self.config.parallel.distributed_timeout_minutes)
                save.publish()
        except Exception as error:  # even out of memory: the other ranks must be informed
            self._problem = with_fix(error) or type(error).__name__
            if save.rank == 0:
                save.give_up()
            else:
                save.fail(self._problem)

    def _wait_until_copied(self) -> None:
        self._copied.wait()

    def join(self, seconds: float | None) -> bool:
        """See ``CheckpointSaver.join``; without a limit if ``seconds`` is None."""
        if self._running is None:
            return True
        thread = self._running[1]
        thread.join(seconds)
        return not thread.is_alive()

    def finish(self) -> None:
        """See ``CheckpointSaver.finish``."""
        self.join(None)
        running = self._running
        self._running = None
        if running is None:
            return

        def tell() -> None:
            if self._problem:
                raise CheckpointError(self._problem)

        save = running[0]
        run_on_all_ranks(self._agree, f"write its part of a checkpoint to {save.folder}", tell)
        self._write_other_format(save.final)
