"""Memory of this rank: predicted, actual, and snapshots of one step on SIGUSR2 or when an allocation fails."""

import gc
import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_core.config.parallel import added_moments
from megatron_core.errors import MegatronError, wrapped
from megatron_core.launcher import read_integer
from megatron_core.monitor.device import current_memory_bytes, peak_memory_bytes, total_memory_bytes
from megatron_core.output_file import make_folder, no_follow
from megatron_core.parallel.exit_status import allocation_that_failed
from megatron_core.planner import state_by_kind
from megatron_core.planner.explain import flag_of, predicted_bytes, readable_bytes, settings_that_fit
from megatron_core.planner.hardware import number_size
from megatron_core.planner.memory import matrix_state_elements
from megatron_core.training.callbacks import Callback
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult

LARGEST = 20
"""Number of tensors listed in a snapshot."""
MUCH_LESS = 0.9
"""Suggested settings need at most this share of the predicted bytes of the failed settings."""


def planned_bytes(run: Run) -> float:
    """Predicted bytes of weights, gradients and optimizer state.

    Each bucket is sharded over its own group; the ranks of a stage divide the state of whole matrices equally.
    """
    config = run.config
    total = 0.0
    for shard in run.optimizer.shards:
        size = shard.bucket.dp_group.size()
        sizes = state_by_kind(
            config.training.compute_dtype,
            size,
            zero_stage=config.parallel.dp_zero_stage,
            optimizer=config.optimizer,
            hidden=shard.bucket.kind.is_hidden_matrix,
            added_moments=added_moments(config.parallel),
        )
        # Groups of replicas also have global weights and their momentum.
        outer = 2 * shard.main.element_size() / size if config.optional("outer_steps") else 0
        total += sum(parameter.numel() for parameter in shard.bucket.parameters) * (sum(sizes.values()) + outer)
    weight = number_size(config.training.compute_dtype)
    total += weight * sum(parameter.numel() for _, parameter in run.data_parallel.frozen)
    for bucket in run.data_parallel.frozen_buckets:
        total += weight * sum(parameter.numel() for parameter in bucket.parameters) / bucket.dp_group.size()
    layers = [layer for stage in run.stages for layer in run.layers[stage]]
    of_matrices = matrix_state_elements(config, layers, has_mtp=len(run.layers) - 1 in run.stages)
    wide = max(number_size(config.training.compute_dtype), 4)
    return total + wide * of_matrices / run.groups.group("tp-dp-cp").size()


def describe_memory(run: Run, *, after_step: int = 0) -> str:
    """Return lines for the console: the prediction at the start; after a step, the prediction and the actual bytes."""
    sizes = run.state_bytes()
    plan = planned_bytes(run)
    texts = ", ".join(f"{category} {readable_bytes(size)}" for category, size in sizes.items())
    if not after_step:
        return (
            f"memory of rank {run.groups.rank} by formula: {readable_bytes(plan)} of state\n{wrapped(f'    {texts}')}"
        )
    state = sum(size for category, size in sizes.items() if category != "units whole")
    sent = sum(bucket.wire_bytes for bucket in run.data_parallel.buckets)
    gathered = sum(bucket.gathered_bytes for bucket in run.data_parallel.buckets)
    details = f"    {texts}; sent: gradients {readable_bytes(sent)}, weights {readable_bytes(gathered)}"
    return (
        f"memory of rank {run.groups.rank} after step {after_step}: {readable_bytes(state)} of state, planned "
        f"{readable_bytes(plan)}; peak {readable_bytes(peak_memory_bytes())}\n{wrapped(details)}"
    )


class MemoryPrediction(RunPart):
    """Describes the predicted memory of the first rank."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def descriptions(self) -> Iterator[str]:
        """Yield the prediction, and on a GPU the kernel of attention."""
        yield describe_memory(self.run)
        if self.run.world.device.type == "cuda":
            from megatron_core.reports.gpu_notes import chosen_kernel

            yield f"attention: {chosen_kernel(self.run.config, self.run.world.device)}"

    def notes(self) -> Iterator[str]:
        """See ``gpu_notes``."""
        from megatron_core.reports.gpu_notes import gpu_notes

        if self.run.world.device.type == "cuda":
            from megatron_core.reports.fast_paths import Platform, disabled_paths

            yield from disabled_paths(self.run.config, Platform.current())
        yield from gpu_notes(self.run.config, self.run.groups, self.run.world.device)


class MemoryReport(Callback):
    """Prints predicted and actual memory of rank 0 after its second step, when all buffers exist."""

    priority = 100

    def __init__(self, run: Run) -> None:
        self.run = run
        self._first = run.state.iteration

    def after_step(self, result: StepResult) -> None:
        """Print the line after the second step."""
        iteration = self.run.state.iteration
        if iteration == self._first + 2 and self.run.world.rank == 0:
            print(describe_memory(self.run, after_step=iteration), flush=True)
            if self.run.world.device.type == "cuda":
                from megatron_core.reports.gpu_notes import describe_allocator

                print(describe_allocator(self.run.world.device), flush=True)


class KeptForBackward:
    """Bytes that autograd saves for backward, by the module whose forward saved them: current and peak."""

    def __init__(self, run: Run) -> None:
        self._names = {module: name for stage in run.stages.values() for name, module in stage.named_modules()}
        self._weights = {bucket.weights.untyped_storage().data_ptr() for bucket in run.data_parallel.buckets}
        self._modules: list[str] = []
        self._users: Counter[int] = Counter()
        self._now: Counter[str] = Counter()
        self.at_peak: dict[str, int] = {}
        self.peak = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the tensors saved in this context."""
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with saved_tensors_hooks(lambda tensor: _Kept(self, tensor.detach()), lambda saved: saved.tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._modules.append(self._names.get(module, self._modules[-1] if self._modules else ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    def add(self, tensor: Tensor) -> tuple[int, str, int] | None:
        """Count a tensor's storage once; return the arguments of ``remove``. Weights are not counted (None)."""
        storage = tensor.untyped_storage()
        name = self._modules[-1] if self._modules else ""
        if storage.data_ptr() in self._weights:
            return None
        self._users[storage.data_ptr()] += 1
        if self._users[storage.data_ptr()] == 1:
            self._now[name] += storage.nbytes()
            total = self._now.total()
            if total > self.peak:
                self.peak = total
                self.at_peak = dict(self._now)
        return storage.data_ptr(), name, storage.nbytes()

    def remove(self, pointer: int, name: str, size: int) -> None:
        """Remove one user of a storage; the storage is no longer counted after the last one."""
        self._users[pointer] -= 1
        if not self._users[pointer]:
            self._now[name] -= size


class _Kept:
    """A saved tensor, as long as autograd keeps it."""

    def __init__(self, counts: KeptForBackward, tensor: Tensor) -> None:
        self.tensor = tensor
        self._counts = counts
        self._entry = counts.add(tensor)

    def __del__(self) -> None:
        if self._entry is not None:
            self._counts.remove(*self._entry)


class MemorySnapshots(Callback):
    """Writes ``memory/rank00000_step0000012.json`` into the folder of ``--save``, or the current one.

    SIGUSR2 requests a snapshot of the next step: bytes by kind, activations by module at their peak, and the largest
    tensors after the step. On a GPU, the folder also has torch's snapshot of the allocations in that step, for
    pytorch.org/memory_viz. A failed allocation is explained (``on_failure``).
    """

    priority = 1000

    def __init__(self, run: Run) -> None:
        self.run = run
        self._wanted = False
        self._other = max(current_memory_bytes() - sum(run.state_bytes().values()), 0)
        """Bytes of the process before the first step, without the training state."""
        self._kept: KeptForBackward | None = None
        """Counts of the current step, if a snapshot of it was requested."""
        self._watching = ExitStack()
        self._previous: Any = None

    def before_run(self) -> None:
        """Install the signal handler."""
        if current_thread() is main_thread():  # as in StopRequests
            self._previous = signal.signal(signal.SIGUSR2, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._wanted = True

    def before_step(self) -> None:
        """Start counting if a snapshot is requested."""
        if self._wanted:
            self._wanted = False
            self._kept = KeptForBackward(self.run)
            if self.run.world.device.type == "cuda":
                torch.cuda.memory._record_memory_history()
            self._watching.enter_context(self._kept.watching())

    def after_step(self, result: StepResult) -> None:
        """Write the snapshot of this step, if requested."""
        counts = self._kept
        self._kept = None
        if counts is None:
            return
        self._watching.close()
        path = self._write(self._kinds(counts.peak), counts.at_peak, self.run.state.iteration)
        if self.run.world.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
        largest = Counter(counts.at_peak).most_common(3)
        activations = ", ".join(f"{name or 'the model'} {readable_bytes(size)}" for name, size in largest)
        print(f"memory of rank {self.run.world.rank} in {path}; largest activations: {activations}", flush=True)

    def on_failure(self, error: Exception) -> None:
        """Write a snapshot and explain the error if an allocation failed.

        Errors: ``MegatronError`` if an allocation failed.
        """
        self._watching.close()
        requested = None if isinstance(error, MegatronError) else allocation_that_failed(error)
        if requested is None or not isinstance(error, RuntimeError | MemoryError):
            return
        now = current_memory_bytes()
        kinds = self._kinds(now - self._other - sum(self.run.state_bytes().values()))
        activations = {} if self._kept is None else self._kept.at_peak
        path = self._write(kinds, activations, self.run.state.iteration + 1)
        raise MegatronError(self._explanation(requested, kinds, now, path)) from error

    def close(self) -> None:
        """Stop counting and restore the previous signal handler."""
        self._watching.close()
        if self._previous is not None:
            signal.signal(signal.SIGUSR2, self._previous)

    def _kinds(self, activations: int) -> dict[str, int]:
        return self.run.state_bytes() | {"activations": max(activations, 0), "process": self._other}

    def _write(self, kinds: dict[str, int], activations: dict[str, int], step: int) -> Path:
        run = self.run
        folder = (run.config.checkpoint.run_folder or Path(".")) / "memory"
        make_folder(folder)
        path = folder / f"rank{run.world.rank:05d}_step{step:07d}.json"
        if run.world.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
        record = {
            "rank": run.world.rank, "step": step, "layout": run.layout, "bytes": kinds,
            "activations": dict(Counter(activations).most_common()), "tensors": largest_tensors(run),
        }  # fmt: skip
        with open(path, "w", encoding="utf-8", opener=no_follow) as file:
            file.write(json.dumps(record, indent=1) + "\n")
        return path

    def _explanation(self, requested: int, kinds: dict[str, int], now: int, path: Path) -> str:
        """Describe the use of memory and the settings that would fit."""
        run = self.run
        config = self.run.config
        device = total_memory_bytes() or now
        if run.world.device.type == "cpu":
            device //= read_integer("LOCAL_WORLD_SIZE", run.world.size, least=1)
        needed = predicted_bytes(config, run.world.size, run.vocab_size)
        # Failure below the device's capacity: a system limit, or other processes on the same device.
        room = (device if now + requested > device else now) - self._other
        ways = settings_that_fit(config, run.world.size, run.vocab_size, min(room, MUCH_LESS * needed))
        alternatives = [
            f"{' '.join(word for name, value in change.items() if value for word in flag_of(name, value))} "
            f"({readable_bytes(size)})"
            for change, size in ways
        ]
        fits = "; ".join(alternatives) or "none on this number of ranks; use more ranks or a smaller model"
        sizes = ", ".join(f"{category} {readable_bytes(size)}" for category, size in kinds.items() if size)
        return (
            f"out of memory while allocating {readable_bytes(requested)}. Rank {run.world.rank} held {sizes} (the "
            f"largest tensors are in {path}). By prediction a rank needs {readable_bytes(needed)}, and would fit with: "
            f"{fits}"
        )


def largest_tensors(run: Run) -> list[dict[str, Any]]:
    """The largest tensors referenced from Python: purpose if known, shape, dtype and bytes."""
    known: dict[int, str] = {}
    for bucket, state in run.optimizer.tensors():
        where = f"{bucket.names[0]} to {bucket.names[-1]}"
        owned = {"weights": bucket.weights, "gradients": bucket.grads, "gradient shard": bucket.grad_shard} | state
        for category, tensor in owned.items():
            known.setdefault(tensor.untyped_storage().data_ptr(), f"{category} of {where}")
    for piece in run.optimizer.joint_state():
        known.setdefault(piece.memory.untyped_storage().data_ptr(), piece.name)
    by_storage: dict[int, Tensor] = {}
    for candidate in gc.get_objects():
        if type(candidate) in (Tensor, nn.Parameter) and not candidate.is_meta and candidate.layout == torch.strided:
            try:
                storage = candidate.untyped_storage()
            except NotImplementedError:  # the undefined tensor, which torch 2.8 keeps after a backward
                continue
            other = by_storage.get(storage.data_ptr())
            if storage.nbytes() and (other is None or other.numel() < candidate.numel()):
                by_storage[storage.data_ptr()] = candidate
    largest = sorted(by_storage.items(), key=lambda item: -item[1].untyped_storage().nbytes())[:LARGEST]
    return [
        {
            "what": known.get(pointer, "unknown"), "shape": list(tensor.shape), "dtype": str(tensor.dtype),
            "bytes": tensor.untyped_storage().nbytes(),
        }
        for pointer, tensor in largest
    ]  # fmt: skip
