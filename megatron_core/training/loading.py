"""Loading a checkpoint into the tensors of a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from megatron_core.checkpoint import CheckpointReader, TensorBox, parameter_pieces
from megatron_core.checkpoint.one_pass import DamagedCheckpoint
from megatron_core.checkpoint.reader import note
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import OptimizerConfig, RunConfig
from megatron_core.config.optimizers import AVERAGE
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import CheckpointError
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.texts import gather_from_all_ranks, listed
from megatron_core.training.parts import AddedWeights, missing_in, outside_of
from megatron_core.training.state import (
    TrainState,
    held_weights,
    open_checkpoint,
    optimizer_pieces,
    saved_pieces,
    weight_pieces,
)


def load_intact(
    config: RunConfig,
    reader: StateReader | None,
    device: torch.device,
    load: Callable[[StateReader | None], TrainState],
) -> TrainState:
    """``load(reader)``; if the files that it reads are damaged, of an older checkpoint in the same folder.

    Errors: ``CheckpointError`` on all ranks if none is intact, or if the older one would change settings of this run,
    whose model exists already.
    """
    damaged = dict[Path, str]()
    while True:
        try:
            return load(reader)
        # Raised on all ranks at once, so that all of them try the next checkpoint. Weights that were read already are
        # overwritten.
        except DamagedCheckpoint as error:
            if error.folder in damaged:
                raise
            damaged[error.folder] = str(error)
            reader = _open_older(config, error, device, damaged)


def _open_older(
    config: RunConfig, error: DamagedCheckpoint, device: torch.device, damaged: Mapping[Path, str]
) -> CheckpointReader:
    """Open the newest checkpoint that is not among the ``damaged`` ones, for a model built with ``config``."""
    reader, changed = open_checkpoint(config, device, hash_later=True, damaged=damaged)
    if not isinstance(reader, CheckpointReader):
        raise CheckpointError(f"{error}; load={config.checkpoint.load!r} holds no other checkpoint")
    before = config.flat()
    names = [name for name, value in changed.flat().items() if before[name] != value]
    if names:
        raise CheckpointError(
            f"{error}; the older checkpoint {reader.folder} has other settings than this one, from which the settings "
            f"of this run were taken: {listed(names)}; to load it, give --ckpt-step {reader.manifest.iteration}"
        )
    return reader


def load_state(
    config: RunConfig,
    reader: StateReader,
    data: DataParallel,
    optimizer: Optimizer | None,
    pieces_of_features: Callable[[StateReader], Iterable[TensorBox]] = lambda reader: (),
) -> TrainState:
    """Load weights and optimizer state; return the counters (all 0 with only weights, or ``finetune``).

    ``pieces_of_features(reader)``: other pieces to load if the optimizer continues.
    """
    settings = config.checkpoint
    weights_only = not reader.continues and (settings.finetune or reader.only_weights)
    fresh = weights_only or (settings.no_load_optim and not reader.continues)
    missing = missing_in(reader.state.get("config", {}), config)
    with reader:
        if not reader.continues:
            # Before the first read: a checkpoint that does not fit leaves the model as it is.
            _check_names(reader, data, None if fresh else optimizer, missing)
        of_features = () if fresh else tuple(pieces_of_features(reader))
        pieces = list(saved_pieces(data, held_weights(data)))
        if optimizer is not None:
            pieces += _pieces_of_optimizer(reader, optimizer, fresh=fresh)
        if not fresh and data.compressor is not None:
            pieces += data.compressor.pieces_to_load(reader, data)
        pieces = list(outside_of(missing, [*pieces, *of_features]))
        reader.fill_together(pieces, data.device)
        if optimizer is not None:
            _finish_optimizer(reader, optimizer, fresh=fresh)
        return TrainState() if weights_only else counters(reader)


def counters(reader: StateReader) -> TrainState:
    """The counters that are stored in a checkpoint."""
    known = {counter.name for counter in fields(TrainState)}
    return TrainState(**{name: value for name, value in reader.state.items() if name in known})


def shapes_of_all(pieces: Iterable[TensorBox], device: torch.device) -> dict[str, tuple[int, ...]]:
    """The global shapes of the ``pieces`` of all ranks by name; a collective call."""
    lines = {f"{piece.name} {' '.join(map(str, piece.global_shape))}" for piece in pieces}
    return {
        name: tuple(map(int, shape))
        for text in gather_from_all_ranks("\n".join(sorted(lines)), device)
        for name, *shape in (line.split() for line in text.splitlines())
    }


def _check_names(
    reader: StateReader, data: DataParallel, optimizer: Optimizer | None, missing: Sequence[AddedWeights]
) -> None:
    """Compare the tensors needed by all ranks with the stored tensors; a checkpoint lacks ``missing``."""
    pieces = [piece for bucket in data.all_buckets for piece in saved_pieces(data, weight_pieces(bucket))]
    pieces += saved_pieces(data, parameter_pieces(data.frozen))
    pieces += [] if optimizer is None else optimizer_pieces(optimizer)
    needed = shapes_of_all(outside_of(missing, pieces), data.device)
    kinds = sorted({name.split(".")[1] for name in needed if name.startswith("optimizer.")} - {"main"})
    absent = [state_name for state_name in kinds if state_name not in reader.kinds]
    if AVERAGE.name in absent:  # training continues with averages that begin at the stored weights
        absent.remove(AVERAGE.name)
        needed = {name: shape for name, shape in needed.items() if not name.startswith(f"optimizer.{AVERAGE.name}.")}
    if absent and optimizer is not None:
        reader.check_names({name: shape for name, shape in needed.items() if name.startswith("model.")})
        name, changed = optimizer.config.optimizer, _changed_optimizer(reader, optimizer.config)
        remedy = f"; its {listed(changed)}: give the same settings, or" * bool(changed) or ";"
        if reader.fault_of_state:
            remedy = f"; {reader.fault_of_state}"
        raise CheckpointError(
            f"{reader.folder} has no state of --optimizer {name} ({listed(absent)}){remedy} load only the weights with "
            "--no-load-optim"
        )
    reader.check_names(needed, lambda name: any(added.replace(name) for added in missing))


def _changed_optimizer(reader: StateReader, config: OptimizerConfig) -> list[str]:
    """Stored settings of the same optimizer that differ, as "NAME is VALUE"; empty for another optimizer."""
    stored = reader.state.get("config", {})
    if stored.get("optimizer") != config.optimizer:
        return []
    current = {name: value for name, value in asdict(config).items() if name.startswith(f"{config.optimizer}_")}
    return [f"{name} is {stored[name]}" for name, value in current.items() if stored.get(name, value) != value]


def _lacks_average(reader: StateReader, optimizer: Optimizer) -> bool:
    return optimizer.config.ema_decay is not None and not reader.continues and AVERAGE.name not in reader.kinds


def _pieces_of_optimizer(reader: StateReader, optimizer: Optimizer, *, fresh: bool) -> Iterator[TensorBox]:
    """The pieces of ``optimizer`` to load; ``fresh``: only the main weights."""
    optimizer.forget_local_changes()
    lacks_average = _lacks_average(reader, optimizer)
    for piece in optimizer_pieces(optimizer):
        state_name = piece.name.split(".")[1]
        if state_name == "main" or not (fresh or (lacks_average and state_name == AVERAGE.name)):
            yield piece


def _finish_optimizer(reader: StateReader, optimizer: Optimizer, *, fresh: bool) -> None:
    """Set the counters of ``optimizer`` and missing averages after its pieces have been filled."""
    if fresh:
        optimizer.start_averages()
        return
    if _lacks_average(reader, optimizer):
        note("the average of the weights starts at the weights of the checkpoint, which has none")
        optimizer.start_averages()
    optimizer.set_steps_taken(reader.state["optimizer_steps"])
    optimizer.loss_scale.load_state_dict(reader.state["loss_scale"])
