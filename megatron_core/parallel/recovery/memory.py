"""Memory of a rank that outlives its training process: numbers that its supervisor reads, and two copies of its state.

It is an anonymous file mapped before the training process is forked, so that the supervisor, this process and every
later one share it. Only written pages use memory. The copies are written in turn: a process that dies while it writes
one leaves the other intact.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
GENERATION, BEATS, FINISHED, ITERATION, INJECTED = range(5)
"""Indices of the numbers: generation of the process groups, beats of the process's thread, whether training is
complete, the running iteration, and a bit for each injected fault."""
_SLOTS = 8
"""Index of the first number of the copies."""
_VALID, _TABLE, _TABLE_BYTES, _STATE, _STATE_BYTES, _FIELDS = range(6)


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
        """The copy that was written or chosen last."""
        self.before_commit: Callable[[], None] = lambda: None
        """Called when a copy is written but not yet complete."""

    def was_injected(self, number: int) -> bool:
        """Whether the fault with this number has been injected, in this or an earlier process."""
        return bool(self.numbers[INJECTED] >> number & 1)

    def mark_injected(self, number: int) -> None:
        """Do not inject the fault with this number again."""
        self.numbers[INJECTED] |= 1 << number

    def iterations(self) -> list[int]:
        """The iterations of the complete copies."""
        return sorted({self._number(slot, _VALID) - 1 for slot in (0, 1)} - {-1})

    def begin(self) -> Tensor:
        """Invalidate the older copy and return its bytes, to be filled before ``commit``."""
        self._slot = 1 - self._slot
        self._set(self._slot, _VALID, 0)
        return self._bytes(self._slot)

    def commit(self, iteration: int, table: bytes, state: dict[str, Any], at: int) -> None:
        """Complete the copy begun last: ``table`` describes its tensors, which occupy its first ``at`` bytes."""
        self.before_commit()
        text = json.dumps(state).encode()
        if at + len(table) + len(text) > self.room:
            raise MemoryError(f"recover=in-process: a copy of {at} bytes of state does not fit into {self.room} bytes")
        start = PAGE + self._slot * self.room + at
        self._mapping[start : start + len(table) + len(text)] = table + text
        for field, value in ((_TABLE, at), (_TABLE_BYTES, len(table))):
            self._set(self._slot, field, value)
        for field, value in ((_STATE, at + len(table)), (_STATE_BYTES, len(text)), (_VALID, iteration + 1)):
            self._set(self._slot, field, value)

    def choose(self, iteration: int) -> tuple[Any, dict[str, Any], Tensor]:
        """The table, the state and the bytes of the copy of ``iteration``; the other copy becomes invalid.

        Errors: ``KeyError`` if there is none.
        """
        slot = next((slot for slot in (0, 1) if self._number(slot, _VALID) == iteration + 1), None)
        if slot is None:
            raise KeyError(iteration)
        self._set(1 - slot, _VALID, 0)
        self._slot = slot
        found = []
        for at, length in ((_TABLE, _TABLE_BYTES), (_STATE, _STATE_BYTES)):
            start = PAGE + slot * self.room + self._number(slot, at)
            found.append(json.loads(self._mapping[start : start + self._number(slot, length)]))
        return found[0], found[1], self._bytes(slot)

    def forget(self) -> None:
        """Invalidate both copies."""
        for slot in (0, 1):
            self._set(slot, _VALID, 0)

    def _bytes(self, slot: int) -> Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8, offset=PAGE + slot * self.room, count=self.room)

    def _number(self, slot: int, field: int) -> int:
        return self.numbers[_SLOTS + slot * _FIELDS + field]

    def _set(self, slot: int, field: int, value: int) -> None:
        self.numbers[_SLOTS + slot * _FIELDS + field] = value
