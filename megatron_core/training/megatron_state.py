"""The state of a training of Megatron-LM, as the state of a run of this project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_core.checkpoint.folder import complete_iterations, is_of_megatron
from megatron_core.checkpoint.manifest import MANIFEST
from megatron_core.config import CheckpointConfig, RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.models.megatron_lm import MegatronReader
from megatron_core.models.megatron_lm.arguments import Progress, training_settings
from megatron_core.models.megatron_lm.reader import iteration_folder
from megatron_core.storage import in_storage, location


def state_at(progress: Progress | None, vocab_size: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint at ``progress``, or of iteration 0; ``settings`` are the flat settings of the run."""
    samples = 0 if progress is None else progress.consumed_samples
    return {
        "iteration": 0 if progress is None else progress.iteration,
        "consumed_samples": samples,
        "consumed_tokens": samples * int(settings.get("seq_length", 0)),
        "skipped_iterations": 0 if progress is None else progress.skipped_iterations,
        "skipped_samples": 0 if progress is None else progress.skipped_samples,
        "layout": "",
        "optimizer_steps": 0 if progress is None else progress.optimizer_steps,
        "loss_scale": {} if progress is None else dict(progress.loss_scale),
        "vocab_size": vocab_size,
        "config": {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
    }


def megatron_folder(settings: CheckpointConfig) -> Path | None:
    """The folder of the iteration to load, if ``load`` is a folder of Megatron-LM's checkpoints; else None."""
    if settings.load is None:
        return None
    root = location(settings.load)
    if in_storage(root) is not None or (root / MANIFEST).is_file() or complete_iterations(root):
        return None
    return iteration_folder(root, settings.ckpt_step) if is_of_megatron(root) else None


def open_megatron(settings: CheckpointConfig) -> MegatronReader | None:
    """Open Megatron-LM's checkpoint in ``load`` with the state of its training; None if it is not such a folder.

    Errors: ``CheckpointError`` if counters are missing, unless only the weights are loaded.
    """
    folder = megatron_folder(settings)
    if folder is None:
        return None
    reader = MegatronReader(folder)
    progress = None if settings.finetune else reader.progress()
    stored = reader.settings | (dict(progress.settings) if progress is not None else {})
    reader.state = state_at(progress, reader.state["vocab_size"], stored)
    return reader


def megatron_config(folder: Path) -> RunConfig:
    """The settings of the model, the tokens and the training in an iteration of Megatron-LM."""
    reader = MegatronReader(folder)
    vocabulary = {"vocab_size": reader.state["vocab_size"]}
    return RunConfig.from_flat(reader.settings | vocabulary | training_settings(reader.arguments))


def checkpoint_changes(config: RunConfig) -> Iterator[str]:
    """The flags to add or change if ``load`` is a folder of Megatron-LM's checkpoints."""
    settings, optimizer = config.checkpoint, config.optimizer
    try:
        if megatron_folder(settings) is None:
            return
    except CheckpointError as error:
        yield str(error)
        return
    if settings.save == settings.load:
        yield f"save={settings.save!r} has a checkpoint of Megatron-LM (--load); give another folder with --save"
    is_constant = optimizer.lr_decay_style == "constant" and not (
        optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction
    )
    if not (is_constant or optimizer.lr_one_step_later or settings.finetune):
        yield "the checkpoint in --load is of Megatron-LM; add --lr-one-step-later, or --finetune for a new schedule"
