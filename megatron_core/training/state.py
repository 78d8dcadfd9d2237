"""What a run has come to, and how it is saved and loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.checkpoint import (
    Box,
    CheckpointReader,
    Piece,
    find_checkpoint,
    parameter_pieces,
    pieces_of,
    save_checkpoint,
)
from megatron_core.config import RunConfig
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.errors import CheckpointError
from megatron_core.models.hf import HuggingFaceReader
from megatron_core.optimizer.optimizer import Optimizer
from megatron_core.parallel.sharding import spec_of
from megatron_core.tensor_parallel.amax_history import AmaxHistories
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.training.compatibility import check_same_model, schedule_changes


@dataclass
class TrainState:
    """Counters of a run; position in the data is ``consumed_samples`` alone."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    skipped_samples: int = 0
    """Sequences of the skipped iterations."""
    layout: str = ""
    """The layout in which the run last took a step or was saved."""
    validation_loss: float | None = None
    """The loss of an evaluation at this very iteration, if there was one."""


def weight_pieces(bucket: Bucket) -> Iterator[Piece]:
    """Pieces of the weights in this rank's shard."""
    yield from shard_pieces(bucket, "model", bucket.weight_shard)


def optimizer_pieces(optimizer: Optimizer) -> Iterator[Piece]:
    """Pieces of main weights and moments in this rank's shards."""
    for bucket, tensors in optimizer.tensors():
        for kind, flat in tensors.items():
            yield from shard_pieces(bucket, f"optimizer.{kind}", flat)


def shard_pieces(bucket: Bucket, prefix: str, flat: torch.Tensor) -> Iterator[Piece]:
    """Pieces of ``flat``, which has the layout of this rank's shard, as ``PREFIX.NAME``; of equal copies of a bucket
    only the first one's are owned."""
    for name, parameter, start, stop, at in bucket.pieces():
        part = flat[at : at + stop - start]
        for piece in pieces_of(f"{prefix}.{name}", spec_of(parameter), tuple(parameter.shape), start, stop, part):
            yield piece if bucket.is_writer else replace(piece, owned=False)


def compression_pieces(data: DataParallel) -> Iterator[Piece]:
    """Pieces of what compressed gradients leave for the next step: errors of each data-parallel rank, and factors."""
    for bucket in data.buckets if data.compressor is not None else ():
        assert data.compressor is not None
        rank, size = bucket.dp_group.rank(), bucket.dp_group.size()
        for kind, tensor, own in data.compressor.state(bucket):
            if own:
                part = bucket.weights.numel() // size
                whole = tensor.numel() == bucket.weights.numel()
                span = slice(0, tensor.numel()) if whole else slice(rank * part, (rank + 1) * part)
                label = f"compression.{kind}.{rank}" if whole else f"compression.{kind}"
                for name, parameter, start, stop, at in bucket.pieces(span):
                    local = tuple(parameter.shape)
                    flat = tensor[at : at + stop - start]
                    yield from pieces_of(f"{label}.{name}", spec_of(parameter), local, start, stop, flat)
            else:
                holder = f"{data.groups.index('tp')}.{bucket.names[0]}"
                box = Box((0,) * tensor.dim(), tuple(tensor.shape))
                yield Piece(f"compression.{kind}.{holder}", tuple(tensor.shape), box, tensor, rank == 0)


def fp8_pieces(fp8: AmaxHistories, histories: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """Pieces of ``histories`` of amaxes, of which every rank with the layer has the whole."""
    for name, history in histories.items():
        shape = tuple(history.shape)
        yield Piece(f"fp8.amax_history.{name}", shape, Box((0, 0), shape), history, fp8.group.rank() == 0)


def save_state(
    config: RunConfig,
    state: TrainState,
    data: DataParallel,
    optimizer: Optimizer,
    *,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    fp8: AmaxHistories | None = None,
) -> Path:
    """Write a checkpoint into ``config.checkpoint.save`` and return its folder; drop the one before it if
    ``save_retain_interval`` does not keep it."""
    data.finish_param_sync()
    groups, settings = data.groups, config.checkpoint
    previous = find_checkpoint(settings.save or ".") if settings.save_retain_interval is not None else None
    pieces = [piece for bucket in data.buckets for piece in weight_pieces(bucket)]
    pieces += parameter_pieces(data.frozen_on_first_copy())
    if not settings.no_save_optim:
        pieces += [*optimizer_pieces(optimizer), *compression_pieces(data)]
        pieces += fp8_pieces(fp8, fp8.histories()) if fp8 is not None else []
    folder = save_checkpoint(
        Path(settings.save or "."),
        state.iteration,
        pieces,
        _manifest_state(config, state, optimizer, vocab_size)
        | ({"compression_ranks": groups.size("dp")} if data.compressor is not None else {}),
        rank=groups.rank,
        agree=lambda ok: _all_agree(ok, data.device),
        extra_files={f"tokenizer/{path.name}": path for path in (tokenizer.files() if tokenizer else ())},
    )
    if previous not in (None, folder) and groups.rank == 0:
        drop_checkpoint(previous, settings.save_retain_interval)
    return folder


def drop_checkpoint(folder: Path | None, retain_interval: int | None) -> None:
    """Delete a checkpoint that is not of a multiple of ``retain_interval`` steps."""
    if folder is not None and retain_interval is not None and int(folder.name.rpartition("_")[2]) % retain_interval:
        shutil.rmtree(folder)


def _manifest_state(config: RunConfig, state: TrainState, optimizer: Optimizer, vocab_size: int) -> dict[str, Any]:
    return {
        **asdict(state),
        "optimizer_steps": optimizer.steps_taken,
        "loss_scale": optimizer.loss_scale.state_dict(),
        "vocab_size": vocab_size,
        "config": config.flat(),
    }


def open_checkpoint(config: RunConfig) -> CheckpointReader | HuggingFaceReader | None:
    """The checkpoint that ``config.checkpoint`` names, of the model of ``config``; None without one."""
    settings = config.checkpoint
    folder = None if settings.load is None else find_checkpoint(settings.load, settings.ckpt_step)
    if folder is None and settings.load_hf is not None:
        weights = HuggingFaceReader(settings.load_hf)
        check_same_model(asdict(weights.model), config)
        return weights
    if folder is None:
        if settings.load is not None and settings.needs_checkpoint:
            raise CheckpointError(
                f"load={settings.load!r} holds no checkpoint; give a folder written by --save, or start from scratch "
                "without --exit-on-missing-checkpoint, --finetune and --ckpt-step"
            )
        return None
    reader = CheckpointReader(folder)
    check_same_model(reader.state["config"], config)
    if not settings.finetune and not config.training.skip_train:
        changes = schedule_changes(reader.state["config"], config)
        if changes and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"note: the schedule has changed since the checkpoint: {'; '.join(changes)}", flush=True)
    return reader


def load_state(
    config: RunConfig,
    reader: CheckpointReader | HuggingFaceReader,
    data: DataParallel,
    optimizer: Optimizer | None,
    fp8: AmaxHistories | None = None,
) -> TrainState:
    """Fill weights and optimizer from a checkpoint, and return the counters; a folder of Hugging Face has none."""
    settings = config.checkpoint
    weights_only = settings.finetune or isinstance(reader, HuggingFaceReader)
    with reader:
        reader.fill(parameter_pieces(data.frozen))
        for bucket in data.buckets:
            whole = parameter_pieces(zip(bucket.names, bucket.parameters, strict=True))
            reader.fill(weight_pieces(bucket) if bucket.splits_weights else whole)
        if optimizer is not None:
            _load_optimizer(reader, optimizer, fresh=weights_only or settings.no_load_optim)
        if not weights_only and not settings.no_load_optim:
            _load_compression(reader, data)
            if fp8 is not None and fp8.is_delayed:
                _load_histories(reader, fp8)
        if weights_only:
            return TrainState()
        # Checkpoints written before sequences could grow have no count of tokens.
        older = {"consumed_tokens": reader.state["consumed_samples"] * config.data.seq_length, "skipped_samples": 0}
        counted = {**older, **reader.state}
        return TrainState(**{field.name: counted[field.name] for field in fields(TrainState)})


def _load_optimizer(reader: CheckpointReader | HuggingFaceReader, optimizer: Optimizer, *, fresh: bool) -> None:
    pieces = list(optimizer_pieces(optimizer))
    if fresh:
        reader.fill(piece for piece in pieces if piece.name.startswith("optimizer.main."))
        return
    missing = [p.name for p in pieces if not p.name.startswith("optimizer.main.") and not reader.has(p.name)]
    if missing:
        raise CheckpointError(
            f"{reader.folder} has no state of --optimizer {optimizer.config.optimizer} ({missing[0]}); load the "
            "weights alone with --no-load-optim"
        )
    reader.fill(pieces)
    optimizer.set_steps_taken(reader.state["optimizer_steps"])
    optimizer.loss_scale.load_state_dict(reader.state["loss_scale"])


def _load_compression(reader: CheckpointReader | HuggingFaceReader, data: DataParallel) -> None:
    """Errors are those of a data-parallel rank: with another number of them they are left at zero, and that is said."""
    pieces = list(compression_pieces(data))
    ranks = reader.state.get("compression_ranks")
    if ranks == data.groups.size("dp") and all(reader.has(piece.name) for piece in pieces):
        reader.fill(pieces)
    elif pieces and data.groups.rank == 0:
        print(f"note: the errors of compressed gradients start at zero: the checkpoint has those of {ranks} ranks")


def _load_histories(reader: CheckpointReader | HuggingFaceReader, fp8: AmaxHistories) -> None:
    """Histories that are not there, or of another length, begin anew, and that is said."""
    pieces = list(fp8_pieces(fp8, fp8.allocate()))
    length = reader.state["config"].get("fp8_amax_history_len")
    if length == fp8.settings.fp8_amax_history_len and all(reader.has(piece.name) for piece in pieces):
        reader.fill(pieces)
        return
    fp8.forget()
    if fp8.group.rank() == 0:
        print("note: the checkpoint has no amax histories of this length; FP8 begins with the scales of the tensors")


def _all_agree(ok: bool, device: torch.device) -> bool:
    if not dist.is_initialized():
        return ok
    flag = torch.tensor(int(ok), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
