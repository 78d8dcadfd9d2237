"""Checkpoints of a run's weights and optimizer in folders that a program names, one checkpoint a folder."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_core.checkpoint import Save, save_checkpoint
from megatron_core.checkpoint.folder import complete_iterations, iteration_folder
from megatron_core.checkpoint.reader import CheckpointReader, open_newest
from megatron_core.errors import DataError
from megatron_core.parallel.texts import all_agree
from megatron_core.training.compatibility import check_same_model, check_state
from megatron_core.training.driver import gather_weights
from megatron_core.training.loading import load_state
from megatron_core.training.setup import Run
from megatron_core.training.state import other_pieces, updated_pieces


def save_run(run: Run, folder: Path, description: Mapping[str, Any], *, optimizer: bool, replaces: bool) -> None:
    """Write a checkpoint with ``description`` in its state; a collective call.

    Errors: ``DataError`` if the folder has one already, unless ``replaces``.
    """
    former = tuple(iteration_folder(folder, number) for number in complete_iterations(folder))
    if former and not replaces:
        raise DataError(f"{folder.name!r} exists already; give another name, or overwrite=True")
    run.optimizer.synchronize()
    run.data_parallel.finish_param_sync()
    save = Save(
        folder,
        run.state.iteration,
        {**run.saver.manifest_state(run.state), **description},
        rank=run.world.rank,
        ranks=dist.get_world_size() if dist.is_initialized() else 1,
        replaced=former,
    )
    saved_optimizer = run.optimizer if optimizer else None
    pieces = chain(updated_pieces(run.data_parallel, saved_optimizer), other_pieces(run.data_parallel, saved_optimizer))
    save_checkpoint(save, pieces, lambda ok: all_agree(ok, run.world.device))


def open_run(run: Run, folder: Path, name: str, *, optimizer: bool) -> CheckpointReader:
    """The reader of a checkpoint that has the state ``name``; a collective call.

    Errors: ``DataError`` if there is none, or none with the state of the optimizer.
    """
    reader = open_newest(str(folder), None, device=run.world.device) if complete_iterations(folder) else None
    if reader is None or name not in reader.state:
        raise DataError(f"no weights are stored at {folder.parent.parent.name}/{folder.parent.name}/{folder.name}")
    if optimizer and not reader.kinds:
        raise DataError("these weights have no optimizer state; load them without it")
    check_same_model(check_state(reader.state, reader.folder), run.config, only_weights=not optimizer)
    return reader


def load_run(run: Run, reader: CheckpointReader, *, optimizer: bool) -> None:
    """Load weights and counters, and the state of the optimizer; a collective call. Errors: ``CheckpointError``."""
    config = run.config
    config = replace(config, checkpoint=replace(config.checkpoint, no_load_optim=not optimizer))
    state = load_state(config, reader, run.data_parallel, run.optimizer)
    run.state.iteration = state.iteration
    run.state.consumed_samples = state.consumed_samples
    run.state.consumed_tokens = state.consumed_tokens
    gather_weights([run.data_parallel])
