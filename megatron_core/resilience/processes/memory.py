"""Memory of a rank that outlives its training process: numbers that its supervisor reads, and two copies of a state.

It is an anonymous file mapped before the training process is forked, so that the supervisor, this process and every
later one share it. Only written pages use memory. The copies are written in turn: a process that dies while it writes
one leaves the other intact.
"""

import json
import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
GENERATION, BEATS, FINISHED, ITERATION, INJECTED, MIRRORS, MIRRORED = range(7)
"""Indices of the numbers: generation of the process groups, beats of the process's thread, whether training is
complete, the running iteration, a bit for each injected fault, 1 + the rank whose state is mirrored here, and the stamp
of the newest copy of which another rank has a mirror."""
WAITS, INVITED = 1 << 40, (1 << 40) + 1
"""Generations that never fail, of a rank that joins a running job: before the others expect it, and then."""
_SLOTS = 8
"""Index of the first number of the copies."""
_VALID, _WRITTEN, _OWNER, _TABLE, _TABLE_BYTES, _STATE, _STATE_BYTES, _ROLLBACKS, _FIELDS = range(9)


class Copy(NamedTuple):
    """The state of a rank after an iteration."""

    owner: int
    """The rank of the launcher whose state it is."""
    iteration: int
    generation: int
    """The generation of process groups in which it was written: its ranks have the other parts of the state."""
    rollbacks: int = 0
    """The number of rollbacks to a checkpoint before it; each of them lowers the iteration."""

    @property
    def stamp(self) -> int:
        """A positive number that increases from each copy of a rank to the next one."""
        return (self.generation << 48) + (self.rollbacks << 32) + self.iteration + 1


class HostMemory:
    """The shared numbers and the two copies of one rank."""

    def __init__(self, room: int | None = None, *, rank: int = 0) -> None:
        """``room``: bytes of each copy, by default the size of the machine's memory. ``rank``: the launcher's."""
        self.rank = rank
        self.room = room or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        descriptor = os.memfd_create("megatron-state")
        try:
            os.ftruncate(descriptor, PAGE + 2 * self.room)
            self._mapping = mmap.mmap(descriptor, PAGE + 2 * self.room)
        finally:
            os.close(descriptor)
        self.numbers = memoryview(self._mapping)[:PAGE].cast("q")
        self._slot = 1
        """The copy that is being written."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called when a copy is written but not yet complete."""

    def was_injected(self, number: int) -> bool:
        """Whether the fault with this number has been injected, in this or an earlier process."""
        return bool(self.numbers[INJECTED] >> number & 1)

    def mark_injected(self, number: int) -> None:
        """Do not inject the fault with this number again."""
        self.numbers[INJECTED] |= 1 << number

    def copies(self) -> list[Copy]:
        """The complete copies, oldest first."""
        return sorted((self._copy(slot) for slot in (0, 1) if self._number(slot, _VALID)), key=lambda copy: copy.stamp)

    def begin(self) -> Tensor:
        """Invalidate the older copy and return its bytes, to be filled before ``commit``."""
        self._slot = min((0, 1), key=lambda slot: self._copy(slot).stamp if self._number(slot, _VALID) else 0)
        self._set(self._slot, _VALID, 0)
        return self._bytes(self._slot)

    def commit(self, iteration: int, table: bytes, state: dict[str, Any], size: int, rollbacks: int = 0) -> None:
        """Complete the copy begun last, of this rank in the current generation.

        ``table`` describes its tensors, which occupy its first ``size`` bytes.
        """
        copy = Copy(self.rank, iteration, self.numbers[GENERATION], rollbacks)
        self.commit_copy(copy, table, json.dumps(state).encode(), size)

    def commit_copy(self, copy: Copy, table: bytes, state: bytes, size: int) -> None:
        """Complete the copy begun last, of any rank; ``state`` is JSON."""
        self.before_commit()
        if size + len(table) + len(state) > self.room:
            raise MemoryError(
                f"recover=in-process: a copy of {size} bytes of state does not fit into {self.room} bytes"
            )
        start = PAGE + self._slot * self.room + size
        self._mapping[start : start + len(table) + len(state)] = table + state
        fields = {_TABLE: size, _TABLE_BYTES: len(table), _STATE: size + len(table), _STATE_BYTES: len(state)}
        fields |= {_OWNER: copy.owner, _WRITTEN: copy.generation, _ROLLBACKS: copy.rollbacks}
        fields |= {_VALID: copy.iteration + 1}  # valid at last
        for field, value in fields.items():
            self._set(self._slot, field, value)

    def choose(self, copy: Copy) -> None:
        """Keep only ``copy``, from which training continues. ``KeyError`` if it is absent."""
        self._set(1 - self._slot_of(copy), _VALID, 0)

    def read(self, copy: Copy) -> tuple[bytes, bytes, Tensor]:
        """Table and state of ``copy``, both JSON, and the bytes of its tensors. ``KeyError`` if it is absent."""
        slot = self._slot_of(copy)
        texts = []
        for entry, length in ((_TABLE, _TABLE_BYTES), (_STATE, _STATE_BYTES)):
            start = PAGE + slot * self.room + self._number(slot, entry)
            texts.append(self._mapping[start : start + self._number(slot, length)])
        return texts[0], texts[1], self._bytes(slot)[: self._number(slot, _TABLE)]

    def forget(self) -> None:
        """Invalidate both copies."""
        for slot in (0, 1):
            self._set(slot, _VALID, 0)

    def _slot_of(self, copy: Copy) -> int:
        for slot in (0, 1):
            if self._number(slot, _VALID) and self._copy(slot) == copy:
                return slot
        raise KeyError(copy)

    def _copy(self, slot: int) -> Copy:
        owner = self._number(slot, _OWNER)
        iteration = self._number(slot, _VALID) - 1
        return Copy(owner, iteration, self._number(slot, _WRITTEN), self._number(slot, _ROLLBACKS))

    def _bytes(self, slot: int) -> Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8, offset=PAGE + slot * self.room, count=self.room)

    def _number(self, slot: int, field: int) -> int:
        return self.numbers[_SLOTS + slot * _FIELDS + field]

    def _set(self, slot: int, field: int, value: int) -> None:
        self.numbers[_SLOTS + slot * _FIELDS + field] = value
