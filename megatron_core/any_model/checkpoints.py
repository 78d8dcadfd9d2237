"""Checkpoints of an engine, in the format of training runs."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from megatron_core.any_model.arguments import folder_name
from megatron_core.any_model.deepspeed import load_deepspeed, open_deepspeed
from megatron_core.any_model.scheduler import is_json
from megatron_core.any_model.torch_optimizer import TorchOptimizer
from megatron_core.checkpoint import Box, CheckpointReader, TensorBox, find_checkpoint
from megatron_core.checkpoint.reader import note
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import RunConfig
from megatron_core.config.optimizers import AVERAGE
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import CheckpointError
from megatron_core.features.fp8.amax_history import AmaxHistories
from megatron_core.hub.deepspeed import is_deepspeed_folder
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.texts import listed
from megatron_core.training.loading import load_state
from megatron_core.training.saving import CheckpointSaver, make_saver
from megatron_core.training.state import TrainState, open_checkpoint

WEIGHTS = ("model.", "optimizer.main.")
"""Prefixes of weights and of their float32 values, each of which can be read from the other."""


class PartialReader(StateReader):
    """A checkpoint of which the tensors of the model are read that it has; all others keep their values.

    Tensors that the model does not have are not read. Errors: ``CheckpointError`` if there is no weight of the model,
    or one of another shape.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self.folder, self.state, self.only_weights = reader.folder, reader.state, reader.only_weights

    def __exit__(self, *error: object) -> None:
        self._reader.__exit__(*error)

    @property
    def kinds(self) -> list[str]:
        """The stored kinds of optimizer state."""
        return self._reader.kinds

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether a tensor of that name, or a weight from which it can be read, is stored."""
        prefix = next((start for start in WEIGHTS if name.startswith(start)), None)
        names = [name] if prefix is None else [start + name.removeprefix(prefix) for start in WEIGHTS]
        return any(self._reader.has(stored, shape) for stored in names)

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the boxes of stored tensors."""
        self._reader.fill(self._stored(pieces))

    def fill_together(self, pieces: Iterable[TensorBox], device: torch.device) -> None:
        """As ``fill``, on all ranks."""
        self._reader.fill_together(self._stored(pieces), device)

    def _stored(self, pieces: Iterable[TensorBox]) -> Iterator[TensorBox]:
        return (piece for piece in pieces if self.has(piece.name))

    def check_names(
        self, needed: Mapping[str, tuple[int, ...]], is_unused: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Compare shapes, and print the names of the weights that are not stored."""
        stored = {name: shape for name, shape in needed.items() if self.has(name)}
        absent = [name for name in needed if name.startswith("model.") and name not in stored]
        if not any(name.startswith(WEIGHTS) for name in stored):
            raise CheckpointError(f"{self.folder} has no weight of this model; it needs {listed(absent)}")
        self._reader.check_names(stored, lambda name: True)
        if absent:
            names = listed([name.removeprefix("model.") for name in absent])
            note(f"{self.folder} does not have {len(absent)} weights of the model, which keep their values: {names}")


CHANGED_BY_SCHEDULERS = ("lr", "betas", "momentum")
"""Settings of parameter groups that schedulers of torch change."""


@dataclass
class EngineState(TrainState):
    """Counters of an engine, and the caller's own state in checkpoints."""

    client_state: dict[str, Any] = field(default_factory=dict)
    """JSON values that the caller gave to ``save_checkpoint``."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """State of the caller's learning-rate scheduler."""
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    """Settings of the groups that schedulers change, and all settings of those of the caller's own optimizer."""
    rates_are_the_programs: bool = False
    """Whether the program has changed a learning rate without a scheduler of the engine."""
    shared: dict[str, str] = field(default_factory=dict)
    """Further names of tied parameters, with the names under which they are stored."""


@dataclass(eq=False)
class EngineCheckpoints:
    """Saves and loads the weights, buffers and optimizer state of an engine, and its counters."""

    _module: nn.Module
    _config: RunConfig
    _data: DataParallel
    _optimizer: Optimizer
    _fp8: AmaxHistories | None
    _owns_buffer: Callable[[str], bool]
    """Whether this rank saves a buffer of a name."""
    _savers: dict[str, CheckpointSaver] = field(default_factory=dict)

    def save(self, folder: str | os.PathLike[str], state: EngineState, *, trained_only: bool = False) -> None:
        """Write a checkpoint into ``folder``, also of frozen weights unless ``trained_only``; all ranks call it."""
        name = folder_name(folder)
        if name not in self._savers:
            config = replace(self._config, checkpoint=replace(self._config.checkpoint, save=name))
            self._savers[name] = make_saver(
                config,
                self._data,
                self._optimizer,
                vocab_size=0,
                tokenizer=None,
                added_pieces=self._further,
            )
        state.param_groups = [
            {name: _numbers(group[name]) for name in CHANGED_BY_SCHEDULERS if name in group}
            for group in self._optimizer.param_groups
        ]
        if isinstance(self._optimizer, TorchOptimizer):
            state.param_groups = self._optimizer.group_settings()
        first = {parameter: name for name, parameter in self._module.named_parameters()}
        every = self._module.named_parameters(remove_duplicate=False)
        state.shared = {alias: first[parameter] for alias, parameter in every if first[parameter] != alias}
        in_buckets = (
            pair for bucket in self._data.all_buckets for pair in zip(bucket.names, bucket.parameters, strict=True)
        )
        named = chain(self._data.frozen, in_buckets)
        frozen = {f"model.{name}" for name, parameter in named if not parameter.requires_grad}
        self._data.is_saved = lambda name: not trained_only or name not in frozen
        self._optimizer.before_update()  # only the last of several folders is waited for later
        self._savers[name].save(state)

    def finish(self) -> None:
        """Wait for the checkpoints that are written in the background, and release their folders."""
        for saver in self._savers.values():
            saver.close()
        self._savers.clear()

    def load(
        self, folder: str | os.PathLike[str], iteration: int | None, *, load_optimizer: bool, strict: bool = True
    ) -> EngineState:
        """Load the newest checkpoint of ``folder``, or that of ``iteration``; it may be one of DeepSpeed."""
        name = folder_name(folder)
        if iteration is not None and (type(iteration) is not int or iteration < 0):
            raise CheckpointError(f"iteration={iteration!r} must be an integer >= 0, or None for the newest")
        if not strict and load_optimizer and isinstance(self._optimizer, TorchOptimizer):
            raise CheckpointError("strict=False with an optimizer of torch: give load_optimizer=False")
        self.finish()
        if find_checkpoint(name) is None and is_deepspeed_folder(name):
            if not strict:
                raise CheckpointError(f"strict=False: {name} was written by DeepSpeed; it has all weights of its model")
            return self.load_deepspeed(
                folder, None if iteration is None else f"global_step{iteration}", load_optimizer=load_optimizer
            )
        settings = replace(
            self._config.checkpoint,
            load=name,
            save=None,
            ckpt_step=iteration,
            no_load_optim=not load_optimizer,
            exit_on_missing_checkpoint=True,
        )
        config = replace(self._config, checkpoint=settings)
        opened, _ = open_checkpoint(config, self._data.device)
        assert isinstance(opened, CheckpointReader), "a Hugging Face folder is not a checkpoint of an engine"
        reader = opened if strict else PartialReader(opened)
        stored = reader.state
        self._data.finish_param_sync()
        with reader:
            reader.fill(self._buffers())
            if load_optimizer and isinstance(self._optimizer, TorchOptimizer):
                has_state = bool(stored["optimizer_steps"] or {*opened.kinds} - {"main", AVERAGE.name})
                self._optimizer.load(opened, stored.get("param_groups", []), has_state=has_state)
            pieces = (lambda reader: ()) if self._fp8 is None else self._fp8.pieces_to_load
            loaded = load_state(config, reader, self._data, self._optimizer, pieces)
        if load_optimizer and (stored.get("scheduler") or stored.get("rates_are_the_programs")):
            self._set_rates(stored.get("param_groups", []))
        known = {name: stored[name] for name in ("client_state", "scheduler") if isinstance(stored.get(name), dict)}
        known["rates_are_the_programs"] = bool(load_optimizer and stored.get("rates_are_the_programs"))
        return EngineState(**{**asdict(loaded), **known})

    def load_deepspeed(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, load_optimizer: bool = True
    ) -> EngineState:
        """Load a checkpoint of DeepSpeed: ``tag`` in ``folder``, by default the latest; all ranks call this together.

        Sets the learning rates of the parameter groups if the checkpoint has the same number of groups. Errors:
        ``CheckpointError`` on all ranks.
        """
        self.finish()
        stored = open_deepspeed(folder, tag, self._data, verify=self._config.checkpoint.verify_checkpoint)
        values = load_deepspeed(
            stored, self._module, self._data, self._optimizer, list(self._buffers()), load_optimizer=load_optimizer
        )
        if load_optimizer:
            self._set_rates(stored.param_groups)
        return EngineState(**values)

    def _set_rates(self, stored: list[dict[str, Any]]) -> None:
        """Restore the settings of the next step, which the caller or its scheduler set after the last one."""
        if len(stored) == len(self._optimizer.param_groups):
            for group, settings in zip(self._optimizer.param_groups, stored, strict=True):
                for name in CHANGED_BY_SCHEDULERS:
                    if name in group and name in settings:
                        value = settings[name]
                        group[name] = tuple(value) if isinstance(value, list) else value

    def _further(self) -> Iterator[TensorBox]:
        yield from self._buffers()
        if isinstance(self._optimizer, TorchOptimizer) and not self._config.checkpoint.no_save_optim:
            yield from self._optimizer.saved_boxes()
        if self._fp8 is not None and not self._config.checkpoint.no_save_optim:
            yield from self._fp8.pieces()

    def _buffers(self) -> Iterator[TensorBox]:
        """Persistent buffers, such as running statistics of batch norm; one rank saves each."""
        names = set(self._module.state_dict(keep_vars=True))
        for name, buffer in self._module.named_buffers():
            if name in names:
                shape = tuple(buffer.shape)
                box = Box((0,) * buffer.dim(), shape)
                yield TensorBox(f"buffers.{name}", shape, box, buffer, owned=self._owns_buffer(name))


def check_client_state(values: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` for the first entry that is not JSON."""
    if not isinstance(values, Mapping):
        raise CheckpointError(f"client_state={values!r} must be a dict with JSON values")
    for name, value in values.items():
        if not is_json({name: value}):
            raise CheckpointError(
                f"client_state[{name!r}]={value!r} is not JSON; give numbers, strings, lists, and dicts with "
                "strings as keys (of a tensor or an array: .tolist())"
            )


def _numbers(value: Any) -> Any:
    """Return a setting of a parameter group as JSON; schedulers may set NumPy's numbers and tensors."""
    if isinstance(value, tuple | list):
        return [float(number) for number in value]
    return None if value is None else float(value)
