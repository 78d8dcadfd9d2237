"""Loading a checkpoint of DeepSpeed into an engine, at any ZeRO stage and number of ranks."""

import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.any_model.torch_optimizer import TorchOptimizer
from megatron_core.checkpoint import TensorBox
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import CheckpointError
from megatron_core.hub.deepspeed import DeepSpeedCheckpoint, read_deepspeed_checkpoint, train_state
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.sharding import spec_of
from megatron_core.parallel.texts import listed, raise_on_all_ranks
from megatron_core.training.state import held_weights, optimizer_pieces


class DeepSpeedReader:
    """Fills pieces of an engine's weights and optimizer state, as ``CheckpointReader`` does."""

    def __init__(self, stored: DeepSpeedCheckpoint) -> None:
        self.found = stored
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of each piece, converting dtypes."""
        for piece in pieces:
            tensor = self._whole(piece.name)
            if tuple(tensor.shape) != piece.global_shape:
                raise CheckpointError(
                    f"{self.found.folder}: {piece.name} has the shape {list(tensor.shape)}; this engine needs "
                    f"{list(piece.global_shape)}"
                )
            piece.memory.copy_(tensor[piece.box.index])

    def _whole(self, name: str) -> Tensor:
        """The tensor of a piece; the last one is kept, because pieces of a tensor follow each other."""
        if self._last[0] != name:
            section, _, path = name.partition(".")
            state, _, parameter = path.partition(".")
            if section == "model" or state == "main":
                value = self.found.weight(path if section == "model" else parameter)
            elif section == "buffers":
                value = self.found.buffers[path] if path in self.found.buffers else self.found.weight(path)
            elif state == "step" and parameter.startswith("of."):  # a torch optimizer counts for each parameter
                value = torch.tensor(float(self.found.optimizer_steps))
            else:
                value = self.found.state(parameter, state)
            self._last = (name, value)
        return self._last[1]


def open_deepspeed(
    folder: str | os.PathLike[str], tag: str | None, data: DataParallel, *, verify: bool
) -> DeepSpeedCheckpoint:
    """Open a checkpoint on all ranks; with ``verify`` each compares the checksums of a part of the files.

    Errors: ``CheckpointError`` on all ranks.
    """
    stored: DeepSpeedCheckpoint | None = None
    fault = ""
    try:
        stored = read_deepspeed_checkpoint(os.fspath(folder), tag, verify=False)
        if verify:
            fault = next(stored.damaged(data.groups.rank, data.groups.grid.world_size), "")
    except CheckpointError as error:
        fault = str(error)
    raise_on_all_ranks(fault, data.device)
    assert stored is not None
    return stored


def load_deepspeed(
    stored: DeepSpeedCheckpoint,
    module: nn.Module,
    data: DataParallel,
    optimizer: Optimizer,
    buffers: Iterable[TensorBox],
    *,
    load_optimizer: bool,
) -> dict[str, Any]:
    """Load weights, buffers and optimizer state; return the values of ``EngineState``. All ranks call it together.

    Errors: ``CheckpointError`` on all ranks for another model or optimizer, or damaged files.
    """
    fault = ""
    data.finish_param_sync()
    try:
        _check_names(stored, module, {box.name for box in buffers})
        _fill(stored, module, data, optimizer, buffers, load_optimizer=load_optimizer)
        # The counters, the caller's state, and that of the learning-rate scheduler.
        stored_by_caller = {"client_state": dict(stored.client_state), "scheduler": dict(stored.lr_scheduler)}
        state = asdict(train_state(stored)) | stored_by_caller
    except CheckpointError as error:
        fault = str(error)
    raise_on_all_ranks(fault, data.device)
    return state


def _fill(
    stored: DeepSpeedCheckpoint,
    module: nn.Module,
    data: DataParallel,
    optimizer: Optimizer,
    buffers: Iterable[TensorBox],
    *,
    load_optimizer: bool,
) -> None:
    if load_optimizer:
        stored.name_states(_orders(module, optimizer))
        needed = {moment for shard in optimizer.shards for moment in shard.state}
        absent = sorted(needed - stored.states.keys())
        if absent and stored.optimizer_steps:
            raise CheckpointError(
                f"{stored.folder} has no state of --optimizer {optimizer.config.optimizer} ({listed(absent)}), but "
                f"{listed(sorted(stored.states)) or 'none'}; use the optimizer of the checkpoint, or load only the "
                "weights with load_optimizer=False"
            )
    reader = DeepSpeedReader(stored)
    reader.fill(held_weights(data))
    reader.fill(buffers)
    pieces = list(optimizer_pieces(optimizer))
    mains = [piece for piece in pieces if piece.name.startswith("optimizer.main.")]
    if not load_optimizer or not stored.optimizer_steps:
        reader.fill(mains)
        return
    reader.fill(pieces)
    if isinstance(optimizer, TorchOptimizer):
        optimizer.load(reader, [])
    optimizer.set_steps_taken(stored.optimizer_steps)
    optimizer.loss_scale.load_state_dict(stored.loss_scale)


def _orders(module: nn.Module, optimizer: Optimizer) -> list[list[list[str]]]:
    """Orders in which DeepSpeed's optimizer may have the parameters."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups if group["params"]]
    trained = [name for parameter, name in names.items() if parameter.requires_grad]
    return [groups, [trained], [list(names.values())]]


def _check_names(stored: DeepSpeedCheckpoint, module: nn.Module, buffers: set[str]) -> None:
    """Raise ``CheckpointError`` unless the checkpoint has the parameters of the module, by name and shape."""
    needed = {name: tuple(spec_of(parameter).global_shape) for name, parameter in module.named_parameters()}
    shapes = stored.shapes
    read = {stored.shared.get(name, name) for name in (*needed, *(name.removeprefix("buffers.") for name in buffers))}
    faults = {
        "missing": [name for name in needed if name not in shapes],
        "unexpected": [name for name in shapes if stored.shared.get(name, name) not in read],
        "of another shape": [name for name, shape in needed.items() if shapes.get(name, shape) != shape],
    }
    text = "; ".join(f"{len(names)} {fault} ({listed(names)})" for fault, names in faults.items() if names)
    if text:
        raise CheckpointError(f"{stored.folder} does not have the parameters of this model: {text}")
