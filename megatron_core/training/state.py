"""The state of a run: its counters, its tensors as pieces of a checkpoint, and loading."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron_core.checkpoint import TensorBox, parameter_pieces, pieces_of
from megatron_core.checkpoint.folder import complete_iterations
from megatron_core.checkpoint.formats import formats_of_settings
from megatron_core.checkpoint.reader import note
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import CheckpointConfig, RunConfig
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.errors import CheckpointError
from megatron_core.locations import location, real
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.sharding import spec_of
from megatron_core.training.compatibility import (
    CPU,
    check_features,
    check_same_model,
    check_state,
    differing_settings,
    format_to_resume,
    moved_end,
    refuse_other_formats,
    schedule_changes,
    takes_settings,
    with_settings_of,
)
from megatron_core.training.fast_restarts import fast_restarts
from megatron_core.training.parts import weights_saved_alone


@dataclass
class TrainState:
    """Counters of a run and records of its data; ``consumed_samples`` alone is the position in the data."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    skipped_samples: int = 0
    """Sequences of the skipped iterations."""
    layout: str = ""
    """The layout in which the run last took a step or was saved."""
    validation_loss: float | None = None
    """Validation loss at this iteration, if it was evaluated."""
    left_out: list[int] = field(default_factory=list)
    """Iterations whose batches are left out after rollbacks to a checkpoint."""
    rollbacks: int = 0
    """Number of rollbacks to a checkpoint."""
    data: list[dict[str, Any]] = field(default_factory=list)
    """Records of the files that the run reads, as ``datasets.sources`` makes them."""
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of callbacks (``Callback.stored_values``) by the name of the class."""


def weight_pieces(bucket: Bucket, span: slice | None = None) -> Iterator[TensorBox]:
    """Pieces of the weights in this rank's shard, or in ``span`` of it."""
    yield from shard_pieces(bucket, "model", bucket.weight_shard, span)


def optimizer_pieces(optimizer: Optimizer, *, saved: bool = False) -> Iterator[TensorBox]:
    """Pieces of main weights and moments in this rank's shards, and of the state of the matrices that it owns.

    ``saved``: of shards, only the parts that it saves."""
    for bucket, tensors in optimizer.tensors():
        for state_name, flat in tensors.items():
            yield from shard_pieces(bucket, f"optimizer.{state_name}", flat, bucket.saved_span if saved else None)
    for piece in optimizer.joint_state():
        yield replace(piece, name=f"optimizer.{piece.name}")


def updated_pieces(data: DataParallel, optimizer: Optimizer | None) -> Iterator[TensorBox]:
    """Pieces of a checkpoint that change only in the optimizer's update; without ``optimizer``, only weights.

    The pieces of all ranks, with ``other_pieces``, are the complete checkpoint."""
    for bucket in data.all_buckets:
        # Apart from ``other_pieces``, because a background save copies these while the next step runs, until its
        # update.
        yield from saved_pieces(data, weight_pieces(bucket, bucket.saved_span))
    if optimizer is not None:
        yield from optimizer_pieces(optimizer, saved=True)


def other_pieces(data: DataParallel, optimizer: Optimizer | None) -> Iterator[TensorBox]:
    """The other pieces of a checkpoint, which may change at any point of a step."""
    yield from saved_pieces(data, parameter_pieces(data.frozen_on_first_copy()))
    if optimizer is not None and data.compressor is not None:
        yield from data.compressor.pieces(data)


def shard_pieces(bucket: Bucket, prefix: str, flat: torch.Tensor, span: slice | None = None) -> Iterator[TensorBox]:
    """Pieces ``PREFIX.NAME`` of ``flat``, which has the layout of this rank's shard; ``span``: only this part of the
    bucket, within the shard."""
    span = span or bucket.shard
    first = span.start - bucket.shard.start
    for name, parameter, start, stop, offset in bucket.pieces(span):
        values = flat[first + offset : first + offset + stop - start]
        yield from pieces_of(f"{prefix}.{name}", spec_of(parameter), tuple(parameter.shape), start, stop, values)


def open_checkpoint(
    config: RunConfig,
    device: torch.device = CPU,
    *,
    hash_later: bool = False,
    damaged: Mapping[Path, str] = MappingProxyType({}),
) -> tuple[StateReader | None, RunConfig]:
    """Open the checkpoint to load (None if there is none); return its reader and ``config``.

    A damaged checkpoint is refused; if ``load`` is the folder of all checkpoints, the newest intact one is used
    instead, rank 0 prints a note, and settings taken from the checkpoint come from that one. All ranks call this
    together. ``hash_later`` and ``damaged``: see ``open_newest``; if settings are taken from the checkpoint, all hashes
    are compared at once.
    Errors: ``CheckpointError``, also if ``save`` has another run's checkpoints.
    """
    # Find the checkpoint, or initial weights of another program.
    settings = config.checkpoint
    reader: StateReader | None = None
    if settings.load is not None:
        hash_later = hash_later and not takes_settings(settings)
        refuse_other_formats(f"load={settings.load!r}", settings.load)
        form = format_to_resume(settings.load)
        if form is not None:
            reader = form.open(location(settings.load), settings.ckpt_step, finetune=settings.finetune)
        else:
            reader = fast_restarts(settings, device).open(hash_later=hash_later, damaged=damaged)
    if not config.training.skip_train:
        _refuse_other_runs(settings, opened=reader is not None)
    if reader is None and settings.load is not None and not damaged:  # the caller names the damage
        _refuse_nothing(settings)
    if reader is None:
        return (open_initial_weights(config) if weights_saved_alone(config) is None else None), config
    # Compare the stored settings with the settings of this run.
    stored = check_state(reader.state, reader.folder)
    # The checkpoint that is intact may be older than the one from which settings were taken at the start.
    if reader.takes_settings:
        config = with_settings_of(config, reader.folder)
    check_same_model(stored, config, only_weights=settings.finetune)
    if not settings.finetune and not config.training.skip_train:
        check_features(stored, config, reader.folder)
        changes = schedule_changes(stored, config)
        if changes:
            note(f"the schedule has changed since the checkpoint: {'; '.join(changes)}")
        stored_name = stored.get("optimizer", config.optimizer.optimizer)
        if stored_name != config.optimizer.optimizer and not settings.no_load_optim:
            raise CheckpointError(
                f"optimizer={config.optimizer.optimizer}, but {reader.folder} has the state of --optimizer "
                f"{stored_name}; use this optimizer, or load only the weights with --no-load-optim"
            )
        if changed := differing_settings(stored, config):
            note(f"results will differ from the resumed run: {'; '.join(changed)}")
        if moved := moved_end(stored, config):
            note(moved)
        seed = stored.get("seed", config.training.seed)
        if seed != config.training.seed:
            note(
                f"seed={config.training.seed}, but the checkpoint was trained with seed={seed}: the order of samples "
                "and dropout differ from the resumed run"
            )
    return reader, config


def open_initial_weights(config: RunConfig) -> StateReader | None:
    """Open the weights of another program from which a new run starts, such as --load-hf; None without them."""
    for form, folder in formats_of_settings(config):
        if form.is_openable:
            weights = form.open(folder)
            check_same_model(weights.state["config"], config, only_weights=True)
            return weights
    return None


def _refuse_nothing(settings: CheckpointConfig) -> None:
    """Raise ``CheckpointError`` if ``load``, which has no checkpoint, is not the folder of a run that starts now."""
    assert settings.load is not None
    if settings.asks_for_checkpoint:
        raise CheckpointError(
            f"load={settings.load!r} holds no checkpoint; give a folder written by --save, or start from scratch "
            "without --exit-on-missing-checkpoint, --finetune, --ckpt-step and --use-checkpoint-args"
        )
    if settings.needs_checkpoint:
        lack = "holds no checkpoint" if location(settings.load).exists() else "does not exist"
        raise CheckpointError(
            f"load={settings.load!r} {lack}; give a folder written by --save, or start from scratch without --load. "
            "Only the folder of --save may be without a checkpoint, for a job that is restarted"
        )


def _refuse_other_runs(settings: CheckpointConfig, *, opened: bool) -> None:
    """Raise ``CheckpointError`` if ``save`` holds checkpoints of a run that this run does not resume."""
    if settings.save is None or settings.overwrite_checkpoints:
        return
    save, load = location(settings.save), location(settings.load or "")
    # --load may name the folder of all checkpoints or that of one iteration, and either through links.
    is_same = real(save) in (real(load), os.path.dirname(real(load)))
    resumes = opened and settings.load is not None and not settings.finetune and is_same
    there = () if resumes else complete_iterations(save)
    if there:
        raise CheckpointError(
            f"save={settings.save!r} holds checkpoints of another run, up to iteration {there[-1]}, and this one "
            f"starts {'from others' if opened else 'from scratch'}; resume with --load {settings.save}, give another "
            "folder, or add --overwrite-checkpoints to replace them"
        )


def held_weights(data: DataParallel) -> Iterator[TensorBox]:
    """All weights of this rank; for a bucket with split weights, this rank's shard."""
    yield from parameter_pieces(data.frozen)
    for bucket in data.all_buckets:
        parameters = parameter_pieces(zip(bucket.names, bucket.parameters, strict=True))
        yield from weight_pieces(bucket) if bucket.splits_weights else parameters


def saved_pieces(data: DataParallel, pieces: Iterable[TensorBox]) -> Iterator[TensorBox]:
    """The pieces of weights that checkpoints contain."""
    return (piece for piece in pieces if data.is_saved(piece.name))
