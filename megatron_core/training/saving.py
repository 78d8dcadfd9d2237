"""Writing checkpoints of a run."""

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_core.checkpoint import FolderLock, Save, TensorBox, save_checkpoint
from megatron_core.checkpoint.folder import (
    CONFIG,
    LOCK,
    complete_iterations,
    is_own_distributed,
    iteration_folder,
    iteration_of,
    refuse_foreign,
    refuse_other_checkpoints,
    run_id,
    runs_of,
    write_runs,
)
from megatron_core.checkpoint.formats import format_that_writes
from megatron_core.checkpoint.reader import note
from megatron_core.checkpoint.removal import remove_hidden
from megatron_core.checkpoint.writer import ELSEWHERE
from megatron_core.config import RunConfig
from megatron_core.config.file import write_config
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import CheckpointError, ConfigError, MegatronError
from megatron_core.feature import load_hook, used_features
from megatron_core.locations import in_storage, location
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.output_file import make_folder
from megatron_core.parallel.texts import all_agree, broadcast_from_rank, gather_from_all_ranks, raise_on_all_ranks
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.tokenizers.companions import files_to_store
from megatron_core.training.fast_restarts import fast_restarts
from megatron_core.training.parts import RunPart
from megatron_core.training.state import TrainState, other_pieces, updated_pieces


@dataclass(eq=False)
class CheckpointSaver:
    """Writes the state of ``data`` and ``optimizer`` into the folder of ``save``; all ranks call each method together.

    A feature may write them in the background (``Feature.saver``). Call ``finish`` before the last checkpoint is
    loaded, and the optimizer's ``before_update`` before weights or optimizer state change outside of a step.
    """

    config: RunConfig
    data: DataParallel
    optimizer: Optimizer
    vocab_size: int = field(kw_only=True)
    tokenizer: Tokenizer | None = field(kw_only=True)
    parts: Sequence[RunPart] = field(default=(), kw_only=True)
    """The parts of features, which may have state in checkpoints."""
    added_pieces: Callable[[], Iterable[TensorBox]] = field(default=tuple, kw_only=True)
    """Returns additional pieces to save."""

    def __post_init__(self) -> None:
        self._agree = partial(all_agree, device=self.data.device)
        self._locks: list[FolderLock] = []
        self._is_open = False
        self._restarts = fast_restarts(self.config.checkpoint, self.data.device)
        self._runs: list[str] = []
        self._run = ""
        """Id of the run in its fast-restart checkpoints."""
        self._keeps_config = False
        self._deletion = ""
        self._replaced: tuple[Path, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of ``save``."""
        return location(self.config.checkpoint.save or ".")

    @property
    def _folder_of_other_format(self) -> Path | None:
        """The folder below ``folder`` of checkpoints in ``ckpt_format``."""
        form = self.config.checkpoint.ckpt_format
        return None if form == "native" else self.folder / form

    def open(self, *, is_new: bool = False) -> None:
        """Create and lock the folders, once; ``is_new``: earlier fast-restart checkpoints are of other runs.

        Errors: ``CheckpointError`` on all ranks if any rank fails.
        """
        if self._is_open:
            return
        settings, rank = self.config.checkpoint, self.data.groups.rank
        restarts_fast = settings.non_persistent_save_interval is not None
        folders = {"save": self.folder} if rank == 0 else {}
        if restarts_fast:
            folders |= self._restarts.folders_to_lock(str(self.folder), rank)
            # Each host checks a folder of its own; all must know the same runs.
            self._runs = broadcast_from_rank(0, " ".join(runs_of(self.folder)), self.data.device).split()
        problem = next(filter(None, (self._take(name, folder) for name, folder in folders.items())), "")
        raise_on_all_ranks(problem, self.data.device)
        if restarts_fast:
            self._begin_run(is_new=is_new)
        self._is_open = True

    def pieces(self) -> tuple[Iterable[TensorBox], Iterable[TensorBox]]:
        """This rank's pieces of a checkpoint: those that change only in updates, and the others."""
        optimizer = None if self.config.checkpoint.no_save_optim else self.optimizer
        updated: Iterable[TensorBox] = updated_pieces(self.data, optimizer)
        changing: Iterable[TensorBox] = chain(other_pieces(self.data, optimizer), self.added_pieces())
        for run_part in self.parts:
            updated, changing = run_part.stored_pieces(updated, changing, weights_only=optimizer is None)
        return updated, changing

    def _begin_run(self, *, is_new: bool) -> None:
        """Agree on the id of the run for its fast-restart checkpoints, and print notes about them."""
        problem = ""
        try:
            if self.data.groups.rank == 0:
                self._run = run_id(self.folder, restart=is_new)
                self._runs = runs_of(self.folder)
        except (OSError, CheckpointError) as error:
            problem = f"save={str(self.folder)!r} cannot be written: {error}; give another folder"
        raise_on_all_ranks(problem, self.data.device)
        self._run = broadcast_from_rank(0, self._run, self.data.device)
        for text in self._restarts.notes():
            note(text)

    def _take(self, setting: str, folder: Path) -> str:
        """Create and lock ``folder``; return an error message, or "" on success."""
        try:
            # Before the lock: nothing is written into the folder of another program, not even a lock.
            refuse_foreign(f"{setting}={str(folder)!r}", folder)
            other = self._folder_of_other_format if setting == "save" else None
            if other is not None:
                refuse_foreign(f"{setting}={str(folder)!r}: {other}", other, is_ours=is_own_distributed)
            if setting != "save":
                refuse_other_checkpoints(setting, folder, self.folder, self._runs)
            lock = self._lock(setting, folder)
        except OSError as error:
            return f"{setting}={str(folder)!r} cannot be written: {error}; give another folder"
        except CheckpointError as error:
            return str(error)
        if lock is not None and lock.unsupported:
            note(f"{folder} cannot be locked ({lock.unsupported}): other runs must not save there")
        else:
            for locked in filter(None, (folder, other)):
                remove_hidden(locked)
        if self.config.checkpoint.overwrite_checkpoints and (setting == "save" or self._restarts.is_global):
            self._replaced += tuple(iteration_folder(folder, number) for number in complete_iterations(folder))
        return ""

    def _lock(self, setting: str, folder: Path) -> FolderLock | None:
        """Create and lock ``folder``; object storage has no locks, but must be writable."""
        if in_storage(folder) is not None:
            probe = folder / f".{uuid.uuid4().hex}"
            probe.write_bytes(b"x")
            probe.unlink()
            return None
        make_folder(folder)
        self._locks.append(FolderLock(folder, setting))
        return self._locks[-1]

    def keep_config(self) -> None:
        """Write the configuration for resuming this run to the folder of the checkpoints."""
        named = f"save={str(self.folder)!r}"
        folder = self.config.checkpoint.run_folder or Path(".")
        try:
            make_folder(folder)
            resumed = replace(self.config, checkpoint=self.config.checkpoint.for_resume())
            write_config(resumed, folder / CONFIG, named)
        except OSError as error:
            raise ConfigError(f"{named} cannot be written: {error}; give another folder") from None
        self._keeps_config = True

    def restore_folders(self) -> str:
        """Create deleted folders again, with their locks and the configuration, and print a note about it.

        Returns the problem that prevents this, or "". It costs a few ``stat`` calls; each rank may call it at any time.
        """
        gone: Path | None = None
        try:
            for number, lock in enumerate(self._locks):
                lost = not lock.is_there
                if not lost and (lock.setting != "save" or not self._keeps_config or (self.folder / CONFIG).exists()):
                    continue
                file = lock.folder / (LOCK if lost else CONFIG)
                gone = gone or (file if lock.folder.exists() else lock.folder)
                if lost:
                    make_folder(lock.folder)
                    self._locks[number] = FolderLock(lock.folder, lock.setting)
                    lock.release()
                if lock.setting == "save" and self._run:
                    write_runs(lock.folder, self._runs)
                if lock.setting == "save" and self._keeps_config:
                    self.keep_config()
            if gone is not None:
                self._report_deletion(f"{gone} was deleted or renamed during training; it was created again")
            self._deletion = ""
        except (OSError, MegatronError) as error:
            if gone is not None:
                self._report_deletion(f"{gone} was deleted or renamed and cannot be created again: {error}")
            return str(error)
        return ""

    def _report_deletion(self, text: str) -> None:
        """Print ``text`` unless it is the previous report."""
        if text != self._deletion:
            print(f"note: {text}", flush=True)
        self._deletion = text

    def save(self, state: TrainState, *, temporary: bool = False) -> None:
        """Write a checkpoint; ``temporary``: one for a fast restart, which replaces the one before.

        Errors: ``CheckpointError`` on all ranks; earlier checkpoints are intact. A failure of the previous background
        save is only printed, because this checkpoint is newer.
        """
        self.open()
        # A rank that failed alone would leave the others waiting for its part.
        raise_on_all_ranks(self.restore_folders(), self.data.device)
        self._try(self.finish)
        self.optimizer.synchronize()
        # Gathers of updated weights may still be running (--overlap-param-gather).
        self.data.finish_param_sync()
        settings, groups = self.config.checkpoint, self.data.groups
        save = Save(
            self._restarts.folder(str(self.folder)) if temporary else self.folder,
            state.iteration,
            self.manifest_state(state) | ({"run": self._run} if temporary else {}),
            rank=groups.rank,
            ranks=dist.get_world_size() if dist.is_initialized() else 1,
            extra_files=files_to_store(self.tokenizer, self.config.data.chat_template),
            keep_last=1 if temporary else settings.keep_last,
            keep_every=None if temporary else settings.save_retain_interval,
            replaced=() if temporary else self._replaced,
        )
        updated, changing = self.pieces()
        if not (temporary and self._restarts.write(save, chain(updated, changing), self._agree)):
            self._write(save, updated, changing)
        # The first permanent checkpoint deletes those of the run that it replaces.
        self._replaced = self._replaced if temporary else ()

    def try_to_save(self, state: TrainState, *, temporary: bool = False) -> bool:
        """As ``save``, but only print a failure: training continues with the existing checkpoints.

        Returns whether the checkpoint is written or being written.
        """
        return self._try(lambda: self.save(state, temporary=temporary))

    def _write(self, save: Save, updated: Iterable[TensorBox], changing: Iterable[TensorBox]) -> None:
        """Write the pieces that change only in updates, and the others; or start to."""
        self._write_other_format(save_checkpoint(save, chain(updated, changing), self._agree))

    def finish(self) -> None:
        """Wait for a save in the background to complete. Errors: ``CheckpointError`` on all ranks."""

    def _write_other_format(self, native: Path) -> None:
        """Write the complete checkpoint ``native`` in ``ckpt_format`` too, if it is due; each rank writes a share."""
        settings, folder = self.config.checkpoint, self._folder_of_other_format
        form = settings.ckpt_format
        # Checkpoints for a fast restart are in another folder, and are soon replaced.
        if form == "native" or folder is None or native.parent != self.folder:
            return
        if iteration_of(native) % (settings.ckpt_format_interval or 1):
            return
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        exchange = partial(gather_from_all_ranks, device=self.data.device)
        rank, model = self.data.groups.rank, self.config.model
        format_that_writes(form).write(native, model, folder, rank=rank, ranks=ranks, exchange=exchange)

    def close(self) -> None:
        """Complete the background save and release the locks of the folders; a later ``save`` takes them again."""
        self.finish()
        self.release()

    def release(self) -> None:
        """Release the locks of the folders; after a failure also without the other ranks."""
        while self._locks:
            self._locks.pop().release()
        self._is_open = False

    def join(self, seconds: float) -> bool:
        """After an error, wait for this rank's part of a save in the background; returns whether it has ended."""
        return True

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except CheckpointError as error:
            faults = list(dict.fromkeys(gather_from_all_ranks(str(error), self.data.device)))
            reasons = "; ".join([text for text in faults if not text.endswith(ELSEWHERE)] or faults)
            note(f"saving failed: {reasons}. Training continues; earlier checkpoints are intact")
            return False
        return True

    def manifest_state(self, state: TrainState) -> dict[str, Any]:
        """The counters and settings that are stored with the tensors."""
        compressed = {"compression_ranks": self.data.groups.size("dp")} if self.data.compressor is not None else {}
        return {
            **asdict(state),
            "optimizer_steps": self.optimizer.steps_taken,
            "loss_scale": self.optimizer.loss_scale.state_dict(),
            "vocab_size": self.vocab_size,
            "config": self.config.flat(),
            **compressed,
        } | {name: value for run_part in self.parts for name, value in run_part.stored_values().items()}


def make_saver(config: RunConfig, *arguments: Any, **settings: Any) -> CheckpointSaver:
    """Construct the ``CheckpointSaver`` of a run with further arguments, or that of a feature that the run uses."""
    hooks = [feature.saver for feature in used_features(config) if feature.saver is not None]
    return (load_hook(hooks[0]) if hooks else CheckpointSaver)(config, *arguments, **settings)
