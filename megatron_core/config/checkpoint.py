"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints are written and read. Any layout loads any checkpoint."""

    save: str | None = None
    """Folder for checkpoints; one is written at the end and at --save-interval."""
    save_interval: int | None = None
    """Steps between checkpoints."""
    load: str | None = None
    """Folder of checkpoints to go on from."""
    ckpt_step: int | None = None
    """Iteration to load; default the latest."""
    finetune: bool = False
    """Load only the weights and start counting from 0."""
    no_load_optim: bool = False
    """Do not load the optimizer's state."""
    no_save_optim: bool = False
    """Do not save the optimizer's state."""
    exit_on_missing_checkpoint: bool = True
    """With --load: an empty folder is an error; --no-exit-on-missing-checkpoint starts from scratch."""
