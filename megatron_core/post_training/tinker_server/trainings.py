"""Several trainings in one trainer: each has its weights, optimizer state and counters, and one of them is active.

With ``--lora-rank R`` a training is a set of adapters of any rank r <= R: the matrices A of the other R - r rows, and
the matching columns of B, stay zero, because their gradients are zero. Without it a training has the whole model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import CheckpointError, ConfigError, DataError
from megatron_core.features.lora.adapters import MARK, adapters_of, is_adapter
from megatron_core.features.lora.settings import TuningConfig
from megatron_core.parallel.initialization import draw_by_name
from megatron_core.parallel.sharding import allocate, spec_of
from megatron_core.post_training.run_state import load_run, open_run, save_run
from megatron_core.post_training.tinker_server.catalog import NOTE, STATE
from megatron_core.post_training.trainer import Trainer
from megatron_core.training.driver import gather_weights

MLP = ".mlp."
"""Occurs in the names of the MLP's layers, dense or of experts; the other layers with adapters are attention."""


@dataclass(frozen=True)
class Adaptation:
    """The trained weights of a training: adapters of a rank, or with rank 0 the whole model."""

    rank: int = 0
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    """Remarks of the user, which are stored and listed."""


@dataclass
class _State:
    """A training that is not active: copies of this rank's shards, and the counters."""

    adaptation: Adaptation
    tensors: list[Tensor]
    steps: int = 0
    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0


class Trainings:
    """The trainings of a trainer by name; all ranks call the same methods.

    Errors: ``ConfigError`` for settings of the trainer that keep state elsewhere; ``DataError`` for unknown names.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._run = trainer.run
        _check_settings(trainer)
        # A checkpoint in --load gives the weights of the base model, on which trainings start with new moments.
        for shard in self._run.optimizer.shards:
            for moment in shard.state.values():
                moment.zero_()
        self._states: dict[str, _State] = {}
        self._active: str | None = None
        self._initial = _State(Adaptation(), [tensor.clone() for tensor in self._tensors()])

    @property
    def largest_rank(self) -> int:
        """The largest rank of adapters; 0 if trainings have the whole model."""
        return self._run.config.section(TuningConfig).lora_rank or 0

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def adaptation(self, name: str) -> Adaptation:
        """The trained weights of a training."""
        return self._state(name).adaptation

    def create(self, name: str, adaptation: Adaptation) -> None:
        """Add a training that starts at the base model, and activate it.

        Its adapters are those of a run with its rank and seed.
        """
        largest = self.largest_rank
        if largest and not 1 <= adaptation.rank <= largest:
            raise DataError(f"rank={adaptation.rank}: this server trains adapters of rank 1 to {largest} (--lora-rank)")
        if not largest and adaptation.rank:
            raise DataError(
                f"rank={adaptation.rank}: this server trains the whole model; give rank=0, or start it with --lora-rank"
            )
        self._store_active()
        self._states[name] = _State(adaptation, [tensor.clone() for tensor in self._initial.tensors])
        self._load(name)
        if largest:
            self._draw_adapters(adaptation)

    def activate(self, name: str) -> None:
        """Bring a training into the trainer."""
        self._state(name)
        if self._active != name:
            self._store_active()
            self._load(name)

    def remove(self, name: str) -> None:
        """Forget a training or a copy of weights."""
        self._states.pop(name, None)
        if self._active == name:
            self._active = None

    def copy_weights(self, name: str, copy: str) -> None:
        """Add a copy of the weights of a training, without its optimizer, to sample with; it is not trained."""
        self.activate(name)
        weights = [bucket.weight_shard.clone() for bucket in self._run.data_parallel.buckets]
        self._states[copy] = _State(self._state(name).adaptation, weights)

    def add_base(self, copy: str) -> None:
        """Add a copy of the weights of the base model, to sample with."""
        count = len(self._run.data_parallel.buckets)
        self._states[copy] = _State(Adaptation(rank=self.largest_rank), self._initial.tensors[:count])

    # Checkpoints.

    def save(self, name: str, folder: Path, *, optimizer: bool, replaces: bool, note: Mapping[str, Any]) -> None:
        """Write a checkpoint of a training into its own ``folder``, with its time and remarks in ``note``."""
        self.activate(name)
        description = {STATE: asdict(self._state(name).adaptation), NOTE: dict(note)}
        save_run(self._run, folder, description, optimizer=optimizer, replaces=replaces)

    def load(self, name: str, folder: Path, *, optimizer: bool, user_metadata: Mapping[str, Any] | None = None) -> None:
        """Load a checkpoint of ``save`` into a training, which is created if it does not exist.

        ``user_metadata``: remarks of the training instead of the stored ones.
        """
        reader = open_run(self._run, folder, STATE, optimizer=optimizer)
        adaptation = Adaptation(**reader.state[STATE])
        if user_metadata is not None:
            adaptation = replace(adaptation, user_metadata=user_metadata)
        if name in self._states and self._state(name).adaptation.rank != adaptation.rank:
            raise DataError(f"the stored adapters have rank {adaptation.rank}, those of this training another one")
        self._store_active()
        former = self._states.get(name)
        # From the initial state, because moments that are not loaded begin at zero.
        self._states[name] = _State(adaptation, [tensor.clone() for tensor in self._initial.tensors])
        self._load(name)
        try:
            load_run(self._run, reader, optimizer=optimizer)
        except CheckpointError:
            self.remove(name)
            if former is not None:
                self._states[name] = former
            raise

    # Exchange.

    def _state(self, name: str) -> _State:
        if name not in self._states:
            raise DataError(f"{name!r} is not known to this server, or no longer kept")
        return self._states[name]

    def _tensors(self) -> Iterator[Tensor]:
        """This rank's shards of the weights, followed by the state of the optimizer."""
        run = self._run
        run.data_parallel.finish_param_sync()
        for bucket in run.data_parallel.buckets:
            yield bucket.weight_shard
        for shard in run.optimizer.shards:
            if shard.main.data_ptr() != shard.bucket.weight_shard.data_ptr():
                yield shard.main
            yield from shard.state.values()

    def _store_active(self) -> None:
        """Copy the active training into its state; copies to sample with do not change."""
        if self._active is not None:
            state = self._states[self._active]
            tensors = list(self._tensors())
            if len(state.tensors) == len(tensors):
                for stored, tensor in zip(state.tensors, tensors, strict=True):
                    stored.copy_(tensor)
                state.steps = self._run.optimizer.steps_taken
                state.iteration = self._run.state.iteration
                state.consumed_samples = self._run.state.consumed_samples
                state.consumed_tokens = self._run.state.consumed_tokens
        self._active = None

    def _load(self, name: str) -> None:
        """Copy a state into the trainer; a copy of weights has no optimizer state, and leaves that of the trainer."""
        state = self._states[name]
        run = self._run
        for stored, tensor in zip(state.tensors, self._tensors(), strict=False):
            tensor.copy_(stored)
        run.optimizer.set_steps_taken(state.steps)
        run.state.iteration = state.iteration
        run.state.consumed_samples = state.consumed_samples
        run.state.consumed_tokens = state.consumed_tokens
        self._active = name
        self.scale_adapters(run.stages, name)
        gather_weights([run.data_parallel])

    def scale_adapters(self, stages: Mapping[int, nn.Module], name: str) -> None:
        """Set the factor of the adapters of ``stages`` to that of a training's rank."""
        rank = self._state(name).adaptation.rank
        tuning = self._run.config.section(TuningConfig)
        for _, _, adapter in chain.from_iterable(map(adapters_of, stages.values())):
            adapter.scale = replace(tuning, lora_rank=rank).lora_scale

    @torch.no_grad()
    def _draw_adapters(self, adaptation: Adaptation) -> None:
        """Set the adapters of the active training to their initial values."""
        run = self._run
        for bucket in run.data_parallel.buckets:
            values = {
                name: _initial_value(name, parameter, adaptation)
                for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
            }
            for name, _, start, stop, offset in bucket.pieces():
                bucket.weight_shard[offset : offset + stop - start] = values[name].reshape(-1)[start:stop]
        for shard in run.optimizer.shards:
            if shard.main.data_ptr() != shard.bucket.weight_shard.data_ptr():
                shard.main.copy_(shard.bucket.weight_shard)
        gather_weights([run.data_parallel])


def _initial_value(name: str, parameter: Any, adaptation: Adaptation) -> Tensor:
    """This rank's part of an adapter's matrix: B is zero, and A is drawn up to the rank of the training."""
    value: Any = allocate(spec_of(parameter), parameter.dtype, parameter.device)
    value.init_method = parameter.init_method
    draw_by_name(name, value, adaptation.seed)
    if f"{MARK}lora_A." in name:
        is_trained = adaptation.train_mlp if MLP in name else adaptation.train_attn
        value[..., adaptation.rank if is_trained else 0 :, :] = 0.0
    return value


def _check_settings(trainer: Trainer) -> None:
    """``ConfigError`` for settings with state that ``Trainings`` does not exchange, and for dropout."""
    run = trainer.run
    config = run.config
    values = config.flat()
    names = [name for bucket in run.data_parallel.buckets for name in bucket.names]
    if run.config.section(TuningConfig).lora_rank and not all(map(is_adapter, names)):
        raise ConfigError("lora_rank: other weights than adapters are trained; the server exchanges only adapters")
    if config.optimizer.optimizer != "adam":
        raise ConfigError(f"optimizer={config.optimizer.optimizer}: requests have the rates of Adam; use adam")
    for name in ("load", "lora_load"):
        if values.get(name) and config.section(TuningConfig).lora_rank:
            raise ConfigError(
                f"{name}={values[name]} has adapters, and requests make their own; give the base model with --load-hf "
                "or --pretrained-checkpoint"
            )
    for name in ("use_dora", "moe_router_enable_expert_bias", "ema_decay", "fp8_format"):
        if values.get(name):
            raise ConfigError(f"{name}={values[name]} has state that trainings do not exchange; remove it")
    if (balance := values["moe_router_load_balancing_type"]) == "quantile_balancing":
        raise ConfigError(
            f"moe_router_load_balancing_type={balance} has state that trainings do not exchange; remove it"
        )
    if run.data_parallel.compressor is not None:
        raise ConfigError("compressed gradients have state that trainings do not exchange; remove the compression")
    for name in ("hidden_dropout", "attention_dropout", "lora_dropout"):
        if values.get(name):
            raise ConfigError(
                f"{name}={values[name]}: forward_backward returns the log-probabilities of the step, which dropout "
                "would change; give 0"
            )
