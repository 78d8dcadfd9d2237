"""Hashes of gradients, optimizer state and weights of a training, equal in every layout that has equal bits."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from megatron_core.checkpoint import TensorBox, parameter_pieces
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.data_parallel.fill import global_parameters
from megatron_core.monitor.sinks import metrics_path
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.sharding import spec_of
from megatron_core.reports.hash_records import HashRecord, HashWriter, hash_file
from megatron_core.reports.settings import HashConfig
from megatron_core.reports.tensor_hashes import GlobalHashes, Hashes
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.state import shard_pieces, weight_pieces
from megatron_core.training.step import StepResult


class StateHashes:
    """Hashes the state of ``stages``; all ranks call the same methods together and get equal results.

    Tensors have their global names without a prefix; those of the optimizer's state are ``exp_avg.NAME`` and so on.
    They are in the order of a step: gradients from the last module to the first, the others from the first to the last.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        data: DataParallel,
        optimizer: Optimizer,
        groups: ParallelGroups,
    ) -> None:
        self._data = data
        self._optimizer = optimizer
        numbers = {
            name: stage * _MOST_PARAMETERS + number
            for stage, module in stages.items()
            for number, (name, parameter) in enumerate(global_parameters(module))
            if not spec_of(parameter).is_copy
        }
        states = dict.fromkeys(state_name for _, tensors in optimizer.tensors() for state_name in tensors)
        of_states = {f"{state_name}.{name}": number for name, number in numbers.items() for state_name in states}
        for piece in optimizer.joint_state():
            if piece.owned:
                of_states[piece.name] = numbers[piece.name.partition(".")[2]]
        world = groups.group(WORLD)
        device = data.device
        self._of_gradients = GlobalHashes(world, device, {name: -number for name, number in numbers.items()})
        self._of_weights = GlobalHashes(world, device, numbers)
        self._of_optimizer = GlobalHashes(world, device, of_states)

    def gradients(self) -> Hashes:
        """Hashes of the gradients, which are summed over all ranks, not clipped, and multiplied by the loss scale."""
        return self._of_gradients(
            piece
            for bucket in self._data.buckets
            for piece in map(_unprefixed, _counted(bucket, shard_pieces(bucket, "model", bucket.grad_shard)))
        )

    def weights(self) -> Hashes:
        """Hashes of all weights in the dtype of the model; those of shards, which each rank updates."""
        hashes = self._of_weights(self._weight_pieces())
        # 0/1 Adam changes the weights of each data-parallel rank separately between two synchronizations.
        return replace(hashes, differing=()) if self._optimizer.has_local_changes else hashes

    def optimizer_state(self) -> Hashes:
        """Hashes of moments and of main weights."""
        of_shards = (
            piece
            for bucket, tensors in self._optimizer.tensors()
            for state_name, flat in tensors.items()
            for piece in _counted(bucket, shard_pieces(bucket, state_name, flat))
        )
        return self._of_optimizer(chain(of_shards, self._optimizer.joint_state()))

    def _weight_pieces(self) -> Iterator[TensorBox]:
        for bucket in self._data.all_buckets:
            yield from map(_unprefixed, _counted(bucket, weight_pieces(bucket)))
        first = {id(parameter) for _, parameter in self._data.frozen_on_first_copy()}
        for name, parameter in self._data.frozen:
            for piece in parameter_pieces([(name, parameter)]):
                yield _unprefixed(replace(piece, owned=piece.owned and id(parameter) in first))


class HashedSteps:
    """Computes the records of steps; all ranks call the methods together."""

    def __init__(self, state: StateHashes, *, by_tensor: bool) -> None:
        self._state = state
        self._by_tensor = by_tensor
        self._gradients = HashRecord(iteration=0)

    def initial(self, iteration: int) -> HashRecord:
        """Return the record of weights and optimizer state after ``iteration`` steps."""
        return self._with_state(HashRecord(iteration=iteration))

    def before_update(self, iteration: int) -> None:
        """Hash the gradients of step ``iteration`` (from 1)."""
        self._gradients = self._with(HashRecord(iteration=iteration), "gradients", self._state.gradients())

    def after_step(self, loss: float, grad_norm: float) -> HashRecord:
        """Return the record of the step of the last ``before_update``."""
        return self._with_state(replace(self._gradients, loss=loss, grad_norm=grad_norm))

    def _with_state(self, record: HashRecord) -> HashRecord:
        record = self._with(record, "optimizer", self._state.optimizer_state())
        return self._with(record, "weights", self._state.weights())

    def _with(self, record: HashRecord, quantity: str, hashes: Hashes) -> HashRecord:
        """Add hashes to a record."""
        changes: dict[str, Any] = {quantity: hashes.total}
        if self._by_tensor:
            changes["by_tensor"] = {**record.by_tensor, quantity: dict(hashes.by_tensor)}
        if hashes.differing:
            names = (f"{quantity}: {name}" for name in hashes.differing)
            changes["differing_copies"] = (*record.differing_copies, *names)
        return replace(record, **changes)


_MOST_PARAMETERS = 2**32
"""Larger than the number of parameters of a stage."""


def _counted(bucket: Bucket, pieces: Iterable[TensorBox]) -> Iterator[TensorBox]:
    """The pieces of a bucket's shard, ``owned`` by the first of several ranks with the same shard."""
    return (replace(piece, owned=piece.owned and bucket.is_writer) for piece in pieces)


def _unprefixed(piece: TensorBox) -> TensorBox:
    return replace(piece, name=piece.name.removeprefix("model."))


class HashRecords(Callback):
    """Writes the records of the steps that are due, on rank 0."""

    priority = 450

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = run.config.section(HashConfig)
        state = StateHashes(run.stages, run.data_parallel, run.optimizer, run.groups)
        self._steps = HashedSteps(state, by_tensor=self.settings.record_hashes_by_tensor)
        self._writer: HashWriter | None = None
        self._began = self._hashing = self._hash_seconds = self._all_seconds = 0.0

    def before_run(self) -> None:
        """Open the file and record the initial state."""
        run = self.run
        metrics = metrics_path(run.config.monitor, run.config.checkpoint.run_folder)
        assert metrics is not None, "validated: there is a file"
        if run.world.rank == 0:
            about = {
                "iteration": run.state.iteration, "layout": run.layout, "world_size": run.world.size,
                "dtype": run.config.training.compute_dtype, "by_tensor": self.settings.record_hashes_by_tensor,
                "interval": self.settings.record_hashes_interval,
            }  # fmt: skip
            self._writer = HashWriter(hash_file(metrics), about)
        self._write(self._steps.initial(run.state.iteration))

    def before_step(self) -> None:
        """Start to measure the step."""
        self._began = time.process_time()
        self._hashing = 0.0

    def before_update(self) -> None:
        """Hash the gradients if the step is due."""
        if self._is_due(self.run.state.iteration + 1):
            began = time.process_time()
            self._steps.before_update(self.run.state.iteration + 1)
            self._hashing += time.process_time() - began

    def after_step(self, result: StepResult) -> None:
        """Hash optimizer state and weights if the step is due, and write its record."""
        if self._is_due(self.run.state.iteration):
            began = time.process_time()
            record = self._steps.after_step(result.loss, result.grad_norm)
            self._hashing += time.process_time() - began
            step_seconds = time.process_time() - self._began - self._hashing
            self._write(record, hash_seconds=round(self._hashing, 6), step_seconds=round(step_seconds, 6))
        self._hash_seconds += self._hashing
        self._all_seconds += time.process_time() - self._began

    def after_run(self) -> None:
        """Report the cost of the records."""
        if self._writer is not None and self._all_seconds:
            share = self._hash_seconds / self._all_seconds
            every = self.settings.record_hashes_interval
            print(f"hashes took {share:.2%} of the processor time of steps (--record-hashes-interval {every})")

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, record: HashRecord, **times: float) -> None:
        if self._writer is not None:
            self._writer.write(record, **times)

    def _is_due(self, iteration: int) -> bool:
        return iteration % self.settings.record_hashes_interval == 0
