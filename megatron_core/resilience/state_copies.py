"""Copies of the state in host memory: their writer, where they are found after a failure, and their mirrors."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from megatron_core.checkpoint import TensorBox
from megatron_core.cpu_ranks import interrupt
from megatron_core.errors import MegatronError
from megatron_core.launcher import read_integer
from megatron_core.resilience.host_copy import CopyWriter, LocalCopy
from megatron_core.resilience.processes.keeper import Connection, RemoteCopy
from megatron_core.resilience.processes.memory import MIRRORED, MIRRORS, HostMemory
from megatron_core.resilience.processes.rendezvous import Members, Rendezvous
from megatron_core.resilience.recovery_choice import copies_are_whole
from megatron_core.resilience.settings import RecoveryConfig
from megatron_core.training.callbacks import Callback
from megatron_core.training.state import held_pieces, other_pieces, updated_pieces

LONGEST_WAIT = 300.0
"""Seconds that another rank has to mirror a copy."""
POLL = 0.001
"""Seconds between checks whether a mirror is complete."""


def copies_to_load(
    members: Members, rendezvous: Rendezvous, memory: HostMemory, mirror: HostMemory
) -> Iterator[LocalCopy | RemoteCopy]:
    """The copies to load, as far as they are needed: this rank's own one, then those of the next ranks.

    The own copy becomes the only one in ``memory``. Copies in ``mirror`` are read there.
    """
    for copy in sorted(members.copies, key=lambda copy: (copy.owner - memory.rank) % rendezvous.size):
        if copy in memory.copies():
            memory.choose(copy)
            yield LocalCopy(memory, copy)
        elif copy in mirror.copies():
            yield LocalCopy(mirror, copy)
        else:
            address = rendezvous.keeper(members.holders[copy.owner])
            assert address is not None, "a keeper starts before its rank trains"
            yield RemoteCopy(Connection(address), copy)


def choose_mirror(memory: HostMemory, ranks: Sequence[int]) -> None:
    """Let the keeper read the copies of a rank on another host, or on this one if there is no other."""
    if len(ranks) > 1:
        memory.numbers[MIRRORS] = 1 + ranks[(ranks.index(memory.rank) + _shift(ranks)) % len(ranks)]


def _shift(ranks: Sequence[int]) -> int:
    """Number of places between a rank and the one that it mirrors."""
    shift = read_integer("LOCAL_WORLD_SIZE", 1, least=1)
    return shift if shift % len(ranks) else 1


def await_mirror(memory: HostMemory, ranks: Sequence[int]) -> None:
    """Wait until another of the training ``ranks`` has a mirror of the newest copy.

    Errors: ``InterruptedWait`` if the job fails meanwhile, ``MegatronError`` after ``LONGEST_WAIT`` seconds.
    """
    newest = [copy.stamp for copy in memory.copies()][-1:]
    deadline = time.monotonic() + LONGEST_WAIT
    while newest and memory.numbers[MIRRORED] < newest[0]:
        interrupt.raise_if_requested()
        if time.monotonic() > deadline:
            reader = ranks[(ranks.index(memory.rank) - _shift(ranks)) % len(ranks)]
            raise MegatronError(
                f"recover_mirror: rank {reader} has not read the copy of rank {memory.rank} within {LONGEST_WAIT:.0f} "
                "s; check that its host reaches this one at any port, or remove --recover-mirror"
            )
        time.sleep(POLL)


class RecoveredGeneration(Protocol):
    """The part of a recovery that ``StateCopies`` uses."""

    memory: HostMemory
    generation: int

    def report_training(self) -> None:
        """Report that the first step of this generation starts."""

    def describe(self) -> str:
        """Describe the failure before this generation and the recovery in one line."""

    def regroup_when_due(self, iteration: int) -> None:
        """End the generation after ``iteration`` if its process groups are made again."""


class StateCopies(Callback):
    """Copies the state of this rank before each step, after everything that belongs to the previous one."""

    priority = -50  # before Faults

    def __init__(self, recovery: RecoveredGeneration) -> None:
        self._recovery = recovery
        self._writer = CopyWriter(recovery.memory)
        self._is_first = True
        self._memory = list[int]()
        self._updated = list[TensorBox]()

    def before_step(self) -> None:
        """Copy the state, and in the first step after a failure say how it was survived."""
        run = self.run
        run.data_parallel.finish_param_sync()
        run.optimizer.before_update()
        if run.config.section(RecoveryConfig).recover_mirror and run.world.size > 1:
            await_mirror(self._recovery.memory, run.world.launched)
        state = run.saver.manifest_state(run.state)
        for run_part in run.parts:
            state |= run_part.copied_values()
        self._writer.write(run.state.iteration, self._pieces(), state, rollbacks=run.state.rollbacks)
        if self._is_first and self._recovery.generation and run.world.rank == 0:
            print(self._recovery.describe(), flush=True)
        if self._is_first and run.world.rank == 0:
            self._recovery.report_training()
        self._is_first = False
        self._recovery.regroup_when_due(run.state.iteration)

    def _pieces(self) -> list[TensorBox]:
        """The pieces to copy; those of weights and optimizer state are the same as long as their memory is."""
        run = self.run
        if copies_are_whole(run.config):
            return self._with_parts(held_pieces(run.data_parallel, run.optimizer))
        flat = [bucket.weight_shard for bucket in run.data_parallel.all_buckets]
        flat += [tensor for _, tensors in run.optimizer.tensors() for tensor in tensors.values()]
        flat += [piece.memory for piece in run.optimizer.joint_state()]
        memory = [tensor.data_ptr() for tensor in flat]
        if memory != self._memory:
            self._memory = memory
            self._updated = [piece for piece in updated_pieces(run.data_parallel, run.optimizer) if piece.owned]
        unshared = other_pieces(run.data_parallel, run.optimizer)
        return [piece for piece in self._with_parts(chain(self._updated, unshared)) if piece.owned]

    def _with_parts(self, pieces: Iterable[TensorBox]) -> list[TensorBox]:
        """The pieces with the state of features."""
        for run_part in self.run.parts:
            pieces = run_part.copied_pieces(pieces)
        return list(pieces)
