"""Writing the checkpoints of a run, before the next step or in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.checkpoint import BackgroundSave, FolderLock, Save, Snapshot, save_checkpoint
from megatron_core.checkpoint.folder import complete_iterations, iteration_folder
from megatron_core.checkpoint.newest import note
from megatron_core.checkpoint.writer import ELSEWHERE
from megatron_core.config import RunConfig
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import CheckpointError
from megatron_core.optimizer.optimizer import Optimizer
from megatron_core.parallel.texts import tell_all
from megatron_core.tensor_parallel.amax_history import AmaxHistories
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.training.state import TrainState, saved_pieces

LEAVE_SECONDS = 60.0
"""How long a process that ends by an error waits for its part of a checkpoint."""


class CheckpointSaver:
    """Writes what ``data`` and ``optimizer`` hold into the folder of ``save``. All ranks call each method together.

    With ``async_save`` at most one checkpoint is being written, from one copy of this rank's part: the next waits for
    it. Whoever wants to load what was saved last calls ``finish`` first.
    """

    def __init__(
        self,
        config: RunConfig,
        data: DataParallel,
        optimizer: Optimizer,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        fp8: AmaxHistories | None = None,
    ) -> None:
        self.config, self.data, self.optimizer = config, data, optimizer
        self.vocab_size, self.tokenizer, self.fp8 = vocab_size, tokenizer, fp8
        self._locks: list[FolderLock] = []
        self._is_open = False
        self._replaced: tuple[Path, ...] = ()
        self._snapshot = Snapshot()
        self._running: BackgroundSave | None = None

    @property
    def folder(self) -> Path:
        """That of ``save``."""
        return Path(self.config.checkpoint.save or ".")

    def open(self) -> None:
        """Make the folders and lock them, once. Errors: ``CheckpointError`` on all ranks, also if another has one."""
        if self._is_open:
            return
        problem = ""
        if self.data.groups.rank == 0:
            folders = {"save": self.folder}
            if self.config.checkpoint.non_persistent_save_interval is not None:
                folders["non_persistent_global_ckpt_dir"] = self.config.checkpoint.temporary_folder(str(self.folder))
            problem = next(filter(None, (self._take(name, folder) for name, folder in folders.items())), "")
        told = next(filter(None, tell_all(problem, self.data.device)), "")
        if told:
            raise CheckpointError(told)
        self._is_open = True

    def _take(self, setting: str, folder: Path) -> str:
        """Make ``folder`` and lock it; -> what prevents that."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder, setting)
        except OSError as error:
            return f"{setting}={str(folder)!r} cannot be written: {error}; give another folder"
        except CheckpointError as error:
            return str(error)
        self._locks.append(lock)
        if lock.unsupported:
            note(f"{folder} cannot be locked ({lock.unsupported}): let no other run save there")
        if self.config.checkpoint.overwrite_checkpoints:
            self._replaced += tuple(iteration_folder(folder, number) for number in complete_iterations(folder))
        return ""

    def save(self, state: TrainState, *, temporary: bool = False) -> None:
        """Write a checkpoint; ``temporary``: one for a fast restart, which replaces the one before.

        Errors: ``CheckpointError`` on all ranks; the checkpoints before it are whole. That the one before, in the
        background, has failed is only told: this one is newer.
        """
        self.open()
        self._try(self.finish)
        self.data.finish_param_sync()
        settings, groups = self.config.checkpoint, self.data.groups
        save = Save(
            settings.temporary_folder(str(self.folder)) if temporary else self.folder,
            state.iteration,
            self._manifest_state(state),
            rank=groups.rank,
            ranks=dist.get_world_size() if dist.is_initialized() else 1,
            extra_files={f"tokenizer/{path.name}": path for path in (self.tokenizer.files() if self.tokenizer else ())},
            keep_last=1 if temporary else settings.keep_last,
            keep_every=None if temporary else settings.save_retain_interval,
            replaced=() if temporary else self._replaced,
        )
        pieces = saved_pieces(self.data, None if settings.no_save_optim else self.optimizer, self.fp8)
        if settings.async_save:
            seconds = 60.0 * self.config.parallel.distributed_timeout_minutes
            self._running = BackgroundSave(save, self._snapshot.take(pieces), self._agree, seconds)
        else:
            save_checkpoint(save, pieces, self._agree)
        self._replaced = self._replaced if temporary else ()

    def try_to_save(self, state: TrainState, *, temporary: bool = False) -> bool:
        """As ``save``, but a failure is only told: the run goes on with the checkpoints that it has.

        -> whether the checkpoint is written, or being written.
        """
        return self._try(lambda: self.save(state, temporary=temporary))

    def finish(self) -> None:
        """Wait until what is written in the background is complete. Errors: ``CheckpointError`` on all ranks."""
        running, self._running = self._running, None
        if running is not None:
            running.finish()

    def leave(self) -> None:
        """On the way out after an error, perhaps without the other ranks: let this rank's part be written."""
        if self._running is not None:
            self._running.join(LEAVE_SECONDS)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except CheckpointError as error:
            told = list(dict.fromkeys(tell_all(str(error), self.data.device)))
            reasons = "; ".join([text for text in told if not text.endswith(ELSEWHERE)] or told)
            note(f"A CHECKPOINT WAS NOT WRITTEN: {reasons}. The training goes on; the checkpoints before it are whole")
            return False
        return True

    def _manifest_state(self, state: TrainState) -> dict[str, Any]:
        compressed = {"compression_ranks": self.data.groups.size("dp")} if self.data.compressor is not None else {}
        return {
            **asdict(state),
            "optimizer_steps": self.optimizer.steps_taken,
            "loss_scale": self.optimizer.loss_scale.state_dict(),
            "vocab_size": self.vocab_size,
            "config": self.config.flat(),
            **compressed,
        }

    def _agree(self, ok: bool) -> bool:
        if not dist.is_initialized():
            return ok
        flag = torch.tensor(int(ok), device=self.data.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)
