"""Fault injection for tests of failure handling: ``--inject-fault KIND@RANK:STEP``."""

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megatron_core.checkpoint.folder import iteration_folder, rank_file
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.locations import location
from megatron_core.resilience.links.faults import LinkFault
from megatron_core.resilience.links.recorder import LINKS
from megatron_core.resilience.processes.memory import HostMemory
from megatron_core.resilience.settings import FAULTS_ON_DISK, FAULTS_ON_LINKS, Fault, FaultConfig
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult

BEFORE_STEP = ("nan", "kill", "exception", "hang", "stop", "slow", "wrong-numbers", "clock")
"""Kinds of faults at the start of a step, besides those of transfers."""
SLOW_SECONDS = 5.0
CLOCK_SECONDS = 3600.0
"""Seconds by which the clock is set back."""
FULL_BYTES = 4096
"""Maximum size of a file with the fault ``disk-full``."""


class InjectedError(RuntimeError):
    """Raised by the fault ``exception``."""


class Faults(Callback):
    """The faults of this rank; without ``:always`` they occur only in the first attempt of a torchrun job."""

    priority = -100

    def __init__(self, run: Run) -> None:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        self._memory = run.world.memory
        rank = run.world.rank if self._memory is None else self._memory.rank
        settings = run.config.section(FaultConfig)
        self._faults = settings.faults
        mine = [fault for fault in self._faults if fault.rank == rank]
        due = {(fault.name, fault.step): fault for fault in mine if fault.always or not restarted}
        self.run = run
        self._left = [fault for fault in due.values() if not self._was_injected(fault)]
        if self._memory is not None:
            self._memory.before_commit = lambda: self._die("kill-copy")
        self._undo = ExitStack()
        self._undo_after_save = ExitStack()
        self._damage = ""
        LINKS.faults.remembers = any(fault.name.endswith("-stale") for fault in self._left)
        LINKS.faults.name_groups(run.groups)
        self._weights: tuple[Tensor, Tensor] | None = None
        """Weights that are NaN in this step, and their values."""
        if run.world.size == 1 and any(fault.name == "hang" for fault in self._left):
            raise ConfigError(
                f"inject_fault={' '.join(settings.inject_fault)}: a hang would never end on one rank, "
                "because only other ranks detect it; start 2 ranks or more, or inject another fault"
            )

    def _due(self, *kinds: str) -> str | None:
        """Return the kind of a fault that is due in the current step, or None; each fault is injected once."""
        return self._due_in(self.run.state.iteration + ("nan" in kinds), *kinds)  # of the next step, or of a checkpoint

    def _due_in(self, step: int, *kinds: str) -> str | None:
        due = next((f for f in self._left if f.name in kinds and f.step == step), None)
        if due is None:
            return None
        self._left.remove(due)
        if self._memory is not None and not due.always:
            self._memory.mark_injected(self._faults.index(due))
        print(
            f"{self.run.world.prefix} injected fault: {due.name} in step {step}".lstrip(), file=sys.stderr, flush=True
        )
        return due.name

    def before_step(self) -> None:
        """Inject the faults that are due in the next step."""
        while name := self._due(*BEFORE_STEP, *FAULTS_ON_LINKS):
            if name in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if name == "kill" else signal.SIGSTOP)
            if name == "exception":
                raise InjectedError("an injected fault: exception")
            while name == "hang":
                time.sleep(1.0)
            if name == "slow":
                time.sleep(SLOW_SECONDS)
            if name == "nan":
                self._spoil_weights()
            if name == "wrong-numbers":
                for stage in self.run.stages.values():
                    stage.decoder.layers[-1].register_forward_pre_hook(_compute_wrong_numbers)
            if name == "clock":
                self._undo.callback(setattr, time, "time", time.time)
                time.time = partial(_set_back, time.time)
            fault = LinkFault.of(name)
            if fault is not None:
                LINKS.faults.arm(fault)

    def _was_injected(self, fault: Fault) -> bool:
        faults = self._faults
        return not fault.always and self._memory is not None and self._memory.was_injected(faults.index(fault))

    def _die(self, fault: str, *, after: int = 1) -> None:
        """Kill this process if ``fault`` is due in the step that is ``after`` steps after the complete ones."""
        if self._due_in(self.run.state.iteration + after, fault):
            os.kill(os.getpid(), signal.SIGKILL)

    def is_bad(self, loss: float, grad_norm: float) -> bool:
        """Kill this process before the update of the weights, if this fault is due."""
        self._die("kill-update")
        return False

    def before_update(self) -> None:
        """Restore the weights that were NaN in this step."""
        self._die("kill-gradients")
        if self._weights is not None:
            spoiled, original = self._weights
            spoiled.copy_(original)
            self._weights = None

    def after_step(self, result: StepResult) -> None:
        """Report transmission faults that changed no tensor in their step."""
        for fault in LINKS.faults.disarm():
            where = f"{self.run.world.prefix} {fault.axis}-{fault.damage} in step {self.run.state.iteration}"
            print(f"note: {where.lstrip()} has not happened: no tensor of 16 elements was changed", file=sys.stderr)

    def after_run(self) -> None:
        """Report faults that were not injected, for example because of a mistyped step."""
        absent = self._faults if self.run.world.rank == 0 else ()
        size = self.run.world.launcher_size or self.run.world.size
        absent = [fault for fault in absent if fault.rank >= size]
        for fault in (*self._left, *absent):
            print(
                f"note: inject_fault={fault.name}@{fault.rank}:{fault.step} has not happened: there was no such rank, "
                "step or checkpoint",
                file=sys.stderr,
            )

    def _spoil_weights(self) -> None:
        """Replace weights of this rank by NaN until the gradients are complete."""
        self.run.data_parallel.finish_param_sync()
        self.run.optimizer.before_update()
        weights = self.run.data_parallel.buckets[-1].weight_shard
        self._weights = weights, weights.clone()
        weights.fill_(math.nan)

    def before_save(self, temporary: bool) -> None:
        """Fill or slow down the disk, if this fault is due in the checkpoint of this step."""
        self._die("kill-save", after=0)
        fault = None if temporary else self._due(*FAULTS_ON_DISK)
        self._damage = fault or ""
        if fault == "disk-full":
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            self._undo_after_save.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, limits[1]))
        if fault == "disk-slow":
            self._undo_after_save.callback(setattr, os, "fsync", os.fsync)
            os.fsync = partial(_flush_slowly, os.fsync)

    def after_save(self, temporary: bool, saved: bool) -> None:
        """Damage the checkpoint, if this fault is due."""
        self._undo_after_save.close()
        folder = iteration_folder(location(self.run.config.checkpoint.save or "."), self.run.state.iteration)
        file = folder / rank_file(self.run.world.rank)
        if self._damage in ("truncated-write", "flip-bit"):
            _damage(file, self._damage)

    def close(self) -> None:
        """Restore the disk and the clock, and inject no more transmission faults."""
        LINKS.faults.remembers = False
        LINKS.faults.disarm()
        self._undo_after_save.close()
        self._undo.close()


def die_in_recovery(config: RunConfig, memory: HostMemory, step: int) -> None:
    """Kill this process if ``kill-recovery`` is due in the recovery after which ``step`` is next.

    The failure may have occurred in the step after it, before all ranks had copied their state.
    """
    for number, fault in enumerate(config.section(FaultConfig).faults):
        is_due = fault.name == "kill-recovery" and fault.rank == memory.rank and fault.step in (step, step + 1)
        if is_due and not memory.was_injected(number):
            memory.mark_injected(number)
            print(f"injected fault: kill-recovery before step {fault.step}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def _compute_wrong_numbers(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Change hidden states slightly."""
    first, *following = arguments
    return first * 1.01, *following


def _set_back(clock: Callable[[], float]) -> float:
    """Return the time of a clock that was set back."""
    return clock() - CLOCK_SECONDS


def _flush_slowly(flush: Callable[[int], None], descriptor: int) -> None:
    """Flush a file to a slow disk."""
    time.sleep(SLOW_SECONDS)
    flush(descriptor)


def _damage(path: Path, damage: str) -> None:
    """Cut off a file's last bytes, or flip a bit in its middle."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if damage == "truncated-write":
            file.truncate(size - size // 4)
        else:
            file.seek(size // 2)
            byte = file.read(1)[0]
            file.seek(size // 2)
            file.write(bytes([byte ^ 1]))
