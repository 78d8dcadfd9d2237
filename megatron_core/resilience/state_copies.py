"""Copies of a rank's state in host memory: written before every step, read after a failure, and mirrored.

In another layout, or in the place of another rank, a rank reads the parts that its own memory lacks from the keepers of
the ranks that have them.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_core.checkpoint.boxes import Box, TensorBox
from megatron_core.checkpoint.manifest import TORCH_DTYPES
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.checkpoint.writer import DTYPES
from megatron_core.cpu_ranks import interrupt
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import CheckpointError, MegatronError
from megatron_core.launcher import read_integer
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.resilience.processes.keeper import Connection, RemoteCopy
from megatron_core.resilience.processes.memory import MIRRORED, MIRRORS, Copy, HostMemory
from megatron_core.resilience.processes.rendezvous import Members, Rendezvous
from megatron_core.resilience.recovery_choice import copies_are_whole
from megatron_core.resilience.settings import RecoveryConfig
from megatron_core.training.callbacks import Callback
from megatron_core.training.state import held_weights, optimizer_pieces, other_pieces, saved_pieces, updated_pieces

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, start and stop of a box."""
ALIGNED = 64


class CopyWriter:
    """Writes all pieces of this rank, alternating between the two copies of ``memory``."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._keys: list[Key] = []
        self._table = b""
        self._bytes = 0
        self._offsets: list[int] = []
        self._targets: dict[int, list[Tensor]] = {}
        """The memory of the pieces in each of the two copies, by its address."""

    @torch.no_grad()
    def write(
        self, iteration: int, pieces: Sequence[TensorBox], state: Mapping[str, Any], *, rollbacks: int = 0
    ) -> int:
        """Copy ``pieces``, the state after ``iteration`` and ``rollbacks`` to a checkpoint; returns their bytes."""
        self._describe(pieces)
        if self._bytes > self._memory.room:
            raise CheckpointError(
                f"recover=in-process: the copies of {self._bytes} bytes of state do not fit into the host memory of "
                f"{self._memory.room} bytes; use more ranks or a higher --zero-stage"
            )
        room = self._memory.begin()
        targets = self._targets.get(room.data_ptr())
        if targets is None:
            targets = self._targets[room.data_ptr()] = [
                room[offset : offset + piece.memory.nbytes].view(piece.memory.dtype).view(piece.memory.shape)
                for offset, piece in zip(self._offsets, pieces, strict=True)
            ]
        torch._foreach_copy_(targets, [piece.memory for piece in pieces])
        self._memory.commit(iteration, self._table, dict(state), self._bytes, rollbacks)
        return self._bytes

    def _describe(self, pieces: Sequence[TensorBox]) -> None:
        """Lay out the pieces, unless they are those of the previous copy."""
        keys = [(piece.name, piece.box.start, piece.box.stop) for piece in pieces]
        if keys == self._keys:
            return
        table = []
        offset = 0
        self._offsets = []
        self._targets.clear()
        for piece in pieces:
            self._offsets.append(offset)
            table.append([piece.name, piece.box.start, piece.box.stop, DTYPES[piece.memory.dtype], offset])
            offset += -(-piece.memory.nbytes // ALIGNED) * ALIGNED
        self._keys = keys
        self._bytes = offset
        self._table = json.dumps(table).encode()


class LocalCopy:
    """A copy in this host's memory."""

    def __init__(self, memory: HostMemory, copy: Copy) -> None:
        """Errors: ``KeyError`` if ``memory`` does not have it."""
        self.table, self.state, self._data = memory.read(copy)

    def read(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Views of the bytes of ``spans``, offsets and lengths."""
        return [self._data[offset : offset + length] for offset, length in spans]


@dataclass(frozen=True)
class _Stored:
    """A box in a copy."""

    source: int
    """The index of its copy."""
    box: Box
    dtype: torch.dtype
    offset: int

    @property
    def span(self) -> tuple[int, int]:
        return self.offset, self.box.numel * self.dtype.itemsize


class HostCopy(StateReader):
    """The copies of one iteration."""

    continues = True

    def __init__(self, sources: Iterable[LocalCopy | RemoteCopy]) -> None:
        """``sources``: opened in this order until all is found; boxes of a tensor are equal or disjoint in all of them.
        Errors: ``KeyError`` if there are none."""
        self._left = iter(sources)
        self._sources = list[LocalCopy | RemoteCopy]()
        self._found: dict[str, dict[Box, _Stored]] = {}
        self.folder = Path("the copy in host memory")
        if not self._open_next():
            raise KeyError("no copy")
        self.state: dict[str, Any] = json.loads(self._sources[0].state)

    def _open_next(self) -> bool:
        """Open another source; False if there is none."""
        source = next(self._left, None)
        if source is None:
            return False
        for name, start, stop, dtype, offset in json.loads(source.table):
            box = Box(tuple(start), tuple(stop))
            stored = _Stored(len(self._sources), box, TORCH_DTYPES[dtype], offset)
            self._found.setdefault(name, {}).setdefault(box, stored)
        self._sources.append(source)
        return True

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether there is a part of the tensor; its ``shape`` cannot have changed."""
        while name not in self._found:
            if not self._open_next():
                return False
        return True

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of every piece. Errors: ``CheckpointError`` for absent elements."""
        wanted: dict[int, list[tuple[TensorBox, _Stored]]] = {}
        for piece in pieces:
            for stored in self._parts(piece):
                wanted.setdefault(stored.source, []).append((piece, stored))
        for number, boxes in wanted.items():
            source = self._sources[number]
            spans = [stored.span for _, stored in boxes]
            targets = list[Tensor]()
            values = list[Tensor]()
            for (piece, stored), view in zip(boxes, source.read(spans), strict=True):
                common = piece.box.intersect(stored.box)
                assert common is not None, "the box is a part of the piece"
                targets.append(piece.memory[common.within(piece.box)])
                values.append(_typed(view, stored)[common.within(stored.box)])
            torch._foreach_copy_(targets, values)

    def _parts(self, piece: TensorBox) -> list[_Stored]:
        """The boxes that ``piece`` consists of."""
        while True:
            boxes = self._found.get(piece.name, {})
            same = boxes.get(piece.box)
            sources = (
                [same] if same is not None else [stored for stored in boxes.values() if piece.box.intersect(stored.box)]
            )
            count = sum(common.numel for stored in sources if (common := piece.box.intersect(stored.box)) is not None)
            is_whole = count == piece.box.numel and all(stored.dtype == piece.memory.dtype for stored in sources)
            if is_whole:
                return sources
            if not self._open_next():
                raise CheckpointError(
                    f"{self.folder} of iteration {self.state['iteration']} has {count} of {piece.box.numel} elements "
                    f"of {piece.name}"
                )


def _typed(data: Tensor, stored: _Stored) -> Tensor:
    if data.storage_offset() * data.element_size() % stored.dtype.itemsize:
        data = data.clone()
    return data.view(stored.dtype).view(stored.box.shape)


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


def held_pieces(data: DataParallel, optimizer: Optimizer | None) -> Iterator[TensorBox]:
    """All pieces of this rank, with those that other ranks hold, too."""
    yield from saved_pieces(data, held_weights(data))
    yield from () if optimizer is None else optimizer_pieces(optimizer)
    yield from () if data.compressor is None else data.compressor.pieces(data)
