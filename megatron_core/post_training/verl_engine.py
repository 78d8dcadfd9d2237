"""The training engine of verl over ``Trainer``: its ``BaseEngine`` of version 0.9.1 (September 2026).

verl's controller, samplers, rewards and losses stay as they are. Give the worker
``model.external_lib=megatron_core.post_training.verl_engine``, which registers the engine, and
``strategy=megatron_native``.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.checkpoint.folder import complete_iterations, iteration_folder
from megatron_core.checkpoint.removal import remove
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.lora.adapters import without_adapters
from megatron_core.parallel import World
from megatron_core.parallel.configured import grid_of
from megatron_core.parallel.texts import all_agree
from megatron_core.post_training.objectives import TokenObjective
from megatron_core.post_training.run_state import load_run, open_run, save_run
from megatron_core.post_training.step_data import gather_by_data_rank
from megatron_core.post_training.token_batch import TokenBatch
from megatron_core.post_training.trainer import Trainer
from megatron_core.post_training.trajectories import Trajectory
from megatron_core.post_training.verl_settings import run_config

STRATEGY = "megatron_native"
"""Name of the engine in verl's configuration."""
STATE = "verl"
"""Name of the state that ``save_checkpoint`` adds to a checkpoint."""
MODEL_TYPES = ("language_model", "value_model")
"""verl's types of models: those that sample, and critics, which have a value head."""


class VerlEngine:
    """One rank of verl's engine; the names and arguments of public methods are verl's.

    verl gives each data-parallel rank its own texts, and calls any function of their log-probabilities. They are
    computed first; the function gives a slope for each; ``optimizer_step`` takes one step of the engine on their sum.
    This costs one more forward, and is exact in every layout: the weights do not change in between.

    ``override_transformer_config`` of verl's engine configuration takes any flags of ``megatron-train``.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **kwargs: Any
    ) -> None:
        if kwargs:
            raise ConfigError(f"{', '.join(sorted(kwargs))}: the engine does not read these arguments; remove them")
        self.mode: str | None = None
        self._world = World.from_environment()
        self._config = run_config(model_config, engine_config, optimizer_config, self._world.size)
        offloads = {name: bool(getattr(engine_config, name, False)) for name in ("param_offload", "optimizer_offload")}
        if len(set(offloads.values())) > 1:
            raise ConfigError(f"{offloads}: this engine moves weights and optimizer state together; give both or none")
        self._offloads = offloads["param_offload"]
        self._is_offloaded = False
        self._coordinates = grid_of(self._config.parallel, self._world.size).coordinates(self._world.rank)
        self._trainer: Trainer | None = None
        self._dp_group: Any = None
        self._pending: list[Trajectory] = []
        self._pending_temperature = 1.0
        self._scheduler_steps = 0
        self._saved: list[Path] = []

    @property
    def trainer(self) -> Trainer:
        """The trainer, after ``initialize``."""
        if self._trainer is None:
            raise ConfigError("the engine has no model before initialize(); call it first")
        return self._trainer

    def initialize(self) -> None:
        """Build the model and the optimizer on the ranks that verl has joined."""
        self._trainer = Trainer(self._config, self._world)
        group = self._trainer.run.groups.group("dp")
        if dist.is_initialized() and not isinstance(group, dist.ProcessGroup):
            # verl takes a missing group for all ranks.
            group, _ = dist.new_subgroups(1)
        self._dp_group = group if isinstance(group, dist.ProcessGroup) else None
        self._pending = []
        self._scheduler_steps = 0

    # The layout.

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether weights leave the device between batches."""
        return self._offloads

    is_optimizer_offload_enabled = is_param_offload_enabled  # its state leaves the device with the weights

    def get_data_parallel_size(self) -> int:
        """Number of ranks with texts of their own."""
        return grid_of(self._config.parallel, self._world.size).size("dp")

    def get_data_parallel_rank(self) -> int:
        """Index of this rank among them."""
        return self._coordinates["dp"]

    def get_data_parallel_group(self) -> Any:
        """Their group; None in a program of one process."""
        return self._dp_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether verl collects the outputs of this rank; all ranks with the same texts have them."""
        return not any(self._coordinates[axis] for axis in ("tp", "cp", "pp"))

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights and optimizer state, which go together; gradients are freed on the CPU."""
        if not (model or optimizer):
            return
        leaves = torch.device(device).type != self._world.device.type
        if leaves and device != "cpu":
            raise ConfigError(f"device={device}: this engine computes on {self._world.device.type}; give it or cpu")
        if leaves and not self._is_offloaded:
            self.trainer.offload()
        elif not leaves and self._is_offloaded:
            self.trainer.onload()
        self._is_offloaded = leaves

    # Steps.

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """See ``eval_mode``."""
        return self._in_mode("train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """A context for batches; the trainer sets the mode of its modules itself."""
        return self._in_mode("eval", **kwargs)

    @contextmanager
    def _in_mode(
        self, mode: str, *, disable_auto_offload: bool = False, zero_grad_on_exit: bool = True
    ) -> Iterator[None]:
        self.mode = mode
        keeps = False
        moves = self._offloads and not disable_auto_offload
        try:
            if moves:
                self.to(self._world.device.type)
            yield
            keeps = mode == "eval" or not zero_grad_on_exit
        finally:
            self.mode = None
            if not keeps:
                self.optimizer_zero_grad()
            if moves:
                self.to("cpu")

    def optimizer_zero_grad(self) -> None:
        """Forget the slopes since the last step."""
        self._pending = []

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Log-probabilities of a batch, its loss and metrics; keeps the slopes of the loss unless ``forward_only``.

        ``data``: a TensorDict without padding, with ``input_ids`` of this data-parallel rank. All ranks call this.
        """
        if loss_function is None and not forward_only:
            raise DataError("loss_function=None: training needs one; give it, or forward_only=True")
        # TensorDict.get would return the container of a number.
        with_entropy = "calculate_entropy" in data and bool(data["calculate_entropy"])
        reads = self.trainer.reads
        temperature = _temperature(data["temperature"]) if reads == "log_probs" and "temperature" in data else 1.0
        by_rank = self._gather([row.tolist() for row in data["input_ids"].unbind()])
        trajectories = [Trajectory(tokens, [1] * (len(tokens) - 1)) for texts in by_rank for tokens in texts]
        first = sum(map(len, by_rank[: self.get_data_parallel_rank()]))
        local = slice(first, first + len(by_rank[self.get_data_parallel_rank()]))
        if reads == "values":
            leaves = {"values": self.trainer.values(trajectories)[local]}
        else:
            scores = self.trainer.log_probs(trajectories, temperature=temperature, with_entropy=with_entropy)
            leaves = {"log_probs": scores.log_probs[local]}
            if scores.entropy is not None:
                leaves["entropy"] = scores.entropy[local]
        leaves = {
            name: [row.detach().requires_grad_(not forward_only) for row in rows] for name, rows in leaves.items()
        }
        offsets = data["input_ids"].offsets()
        output = {name: _nested(rows, offsets) for name, rows in leaves.items()}
        loss = torch.ones(())
        metrics: dict[str, Any] = {}
        if loss_function is not None:
            self._count_tokens(data)
            with torch.set_grad_enabled(not forward_only):
                loss, metrics = loss_function(model_output=output, data=data, dp_group=self._dp_group)
        if not forward_only:
            self._keep(trajectories, loss, leaves, temperature)
        return {
            "model_output": {name: rows.detach() for name, rows in output.items()},
            "loss": [float(loss.detach())],
            "metrics": {name: [value] for name, value in metrics.items()},
        }

    def _count_tokens(self, data: Any) -> None:
        """Tell verl's losses the size of the batch of all ranks, by which they divide."""
        tokens = data["loss_mask"].values().sum().double().to(self._world.device)
        if self._dp_group is not None:
            dist.all_reduce(tokens, group=self._dp_group)
        data.set_non_tensor("batch_num_tokens", int(tokens.item()))
        data.set_non_tensor("dp_size", self.get_data_parallel_size())

    def _keep(
        self, trajectories: Sequence[Trajectory], loss: Tensor, leaves: Mapping[str, list[Tensor]], temperature: float
    ) -> None:
        """Keep the slopes of the losses of all data-parallel ranks for the next step."""
        if self._pending and temperature != self._pending_temperature:
            raise DataError(
                f"temperature={temperature} and {self._pending_temperature} in one optimizer step; give one"
            )
        rows = [row for rows in leaves.values() for row in rows]
        slopes = [
            torch.zeros_like(row) if slope is None else slope
            for row, slope in zip(rows, torch.autograd.grad(loss, rows, allow_unused=True), strict=True)
        ]
        count = len(leaves[self.trainer.reads])
        by_text = [
            {name: slopes[number * count + text].tolist() for number, name in enumerate(leaves)}
            for text in range(count)
        ]
        gathered = [values for values_of_rank in self._gather(by_text) for values in values_of_rank]
        # verl's losses have the factor dp_size, because other engines average the gradients of these ranks.
        size = self.get_data_parallel_size()
        self._pending += [
            replace(trajectory, values={name: [slope / size for slope in row] for name, row in values.items()})
            for trajectory, values in zip(trajectories, gathered, strict=True)
        ]
        self._pending_temperature = temperature

    def _gather(self, rows: list[Any]) -> list[list[Any]]:
        """The rows of each data-parallel rank, on all ranks."""
        source_rows = rows if self.is_mp_src_rank_with_outputs() else None
        return gather_by_data_rank(source_rows, self.get_data_parallel_rank(), self._world.device)

    def optimizer_step(self) -> float:
        """Take one step on all slopes since the last one; returns the norm of the gradient."""
        if not self._pending:
            raise DataError("optimizer_step without gradients; call forward_backward_batch before it")
        with_entropy = "entropy" in self._pending[0].values
        reads = self.trainer.reads
        loss = partial(_linear, reads)
        objective = TokenObjective(loss=loss, mean_over="sum", reports_entropy=with_entropy, reads=reads)
        pending = self._pending
        self._pending = []
        result = self.trainer.train_on(pending, objective, lr=self._lr, temperature=self._pending_temperature)
        return float(result.grad_norm)

    @property
    def _lr(self) -> float:
        return float(self.trainer.run.schedule.lr(self._scheduler_steps))

    def lr_scheduler_step(self) -> float:
        """Go to the next step of the schedule; returns its learning rate."""
        self._scheduler_steps += 1
        return self._lr

    def disable_adapter(self) -> AbstractContextManager[None]:
        """A context in which the low-rank adapters have no effect."""
        return without_adapters(list(self.trainer.run.stages.values()))

    # Weights.

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """The weights as ``transformers`` names them, with merged adapters; all ranks iterate together."""
        return self._weights(), None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        was_offloaded = self._is_offloaded
        self.to(self._world.device.type)
        try:
            yield from self.trainer.weights()
        finally:  # also if the caller gives up the iteration
            if was_offloaded:
                self.to("cpu")

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save weights, optimizer and schedule, which can be loaded in another layout."""
        _refuse_hdfs(hdfs_path)
        folder = Path(local_path)
        description = {STATE: {"scheduler_steps": self._scheduler_steps, "global_step": global_step}}
        save_run(self.trainer.run, folder, description, optimizer=True, replaces=True)
        self._saved = [*(other for other in self._saved if other != folder), folder]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            if self.trainer.is_first_rank:
                for iteration in complete_iterations(oldest):
                    remove(iteration_folder(oldest, iteration))
        # No rank must look for a checkpoint that rank 0 is deleting.
        all_agree(True, self._world.device)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        """Load what ``save_checkpoint`` has written. As by other engines, files that are not downloads are kept."""
        _refuse_hdfs(hdfs_path)
        reader = open_run(self.trainer.run, Path(local_path), STATE, optimizer=True)
        load_run(self.trainer.run, reader, optimizer=True)
        self._scheduler_steps = int(reader.state[STATE]["scheduler_steps"])
        self._pending = []


def register_verl_engine(
    backend: str = STRATEGY, devices: Sequence[str] = ("cuda", "cpu"), model_types: Sequence[str] = MODEL_TYPES
) -> type:
    """Add the engine to verl's registry; returns the registered class."""
    from verl.workers.engine.base import BaseEngine, EngineRegistry

    engine = type("RegisteredVerlEngine", (VerlEngine, BaseEngine), {"__doc__": VerlEngine.__doc__})
    for model_type in model_types:
        EngineRegistry.register(model_type=model_type, backend=[backend], device=list(devices))(engine)
    return engine


def _linear(name: str, numbers: Tensor, batch: TokenBatch) -> Tensor:
    """The sum over tokens whose gradient is that of verl's loss."""
    total = batch[name] * numbers
    if batch.entropy is not None:
        total = total + batch["entropy"] * batch.entropy
    return total


def _nested(rows: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """Rows of n - 1 predicted tokens as verl's of n: the last token of a text predicts nothing."""
    values = torch.cat([part for row in rows for part in (row, row.new_zeros(1))])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _temperature(value: Any) -> float:
    values = set(value.flatten().tolist()) if isinstance(value, Tensor) else {float(value)}
    if len(values) != 1:
        raise DataError(f"temperature has {len(values)} values in one batch; this engine takes one")
    return float(values.pop())


def _refuse_hdfs(path: str | None) -> None:
    if path is not None:
        raise ConfigError(f"hdfs_path={path}: this engine writes to a file system; give None")


if importlib.util.find_spec("verl") is not None:
    register_verl_engine()
