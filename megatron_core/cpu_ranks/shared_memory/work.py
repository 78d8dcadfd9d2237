"""Waiting for other ranks: handles, time limits, and errors that name the missing rank."""

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_core.cpu_ranks import interrupt
from megatron_core.cpu_ranks.filled_work import FilledWork
from megatron_core.cpu_ranks.shared_memory.host import Peer
from megatron_core.parallel.exit_status import LostRankError

SLICE = 100_000
"""Microseconds between checks for signals, time limits and dead processes."""
KINDS = ("barrier", "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send")
"""Indexed by the constants of csrc/cpu/transport/transport.h."""

Attempt = Callable[[int], int]
"""Tries to complete an operation within the given microseconds; returns 0, 1 + the group member that is missing, or -1
- the member that called another operation."""


class Members:
    """The processes of a group's ranks."""

    def __init__(self, ranks: Sequence[int], peers: Sequence[Peer], timeout: timedelta, native: Any) -> None:
        self.ranks = list(ranks)
        self._peers = list(peers)
        self._native = native
        self.limit = timeout.total_seconds()
        self.group = 0
        """Handle of the native group, once it is created."""

    def wait_for(self, what: str, number: int, attempt: Attempt, limit: float) -> None:
        """Repeat ``attempt`` until it completes; ``LostRankError`` if the missing rank has ended or ``limit`` seconds
        pass."""
        missing = attempt(SLICE)
        if missing == 0:
            return
        deadline = time.monotonic() + limit - SLICE / 1e6
        while missing:
            interrupt.raise_if_requested()
            if missing < 0:
                raise RuntimeError(self._mismatch(what, number, -1 - missing))
            member = missing - 1
            left = int(1e6 * (deadline - time.monotonic()))
            if not self._peers[member].is_alive and (missing := attempt(0)):
                raise LostRankError(
                    f"{what} over ranks {self.ranks}: connection closed by peer: rank {self.ranks[member]} "
                    f"(process {self._peers[member].pid}) has ended"
                )
            if left <= 0:
                raise LostRankError(
                    f"{what} over ranks {self.ranks}: rank {self.ranks[member]} (process {self._peers[member].pid}) "
                    f"did not join within {limit:.0f} s; if it is only slow, raise distributed_timeout_minutes"
                )
            missing = missing and attempt(min(SLICE, left))

    def _mismatch(self, what: str, number: int, member: int) -> str:
        """Describe the operation that a member called instead of the expected one."""
        header = (ctypes.c_int64 * 5)()
        self._native.posted(self.group, member, 0, number, header)
        operation, dtype, reduction, root, size = header
        return (
            f"{what} over ranks {self.ranks}: rank {self.ranks[member]} called {KINDS[operation]} (dtype {dtype}, "
            f"reduction {reduction}, root {root}, {size} bytes) instead, or with other sizes; all ranks of a group "
            "must call the same collectives in the same order"
        )


class Pending(FilledWork):
    """The handle of a posted operation."""

    def __init__(self, members: Members, what: str, number: int, attempt: Attempt | None, filled: list[Tensor]) -> None:
        super().__init__(filled)
        self._members = members
        self._what = what
        self._number = number
        self._given = attempt
        self.limit = members.limit
        self.done = False

    def _attempt(self, slice_: int) -> int:
        """Call the ``Attempt``; overridden by subclasses.

        A bound method stored in an attribute would be a reference cycle, which would keep the filled tensors in memory
        until garbage collection.
        """
        assert self._given is not None, "a handle without an attempt overrides this"
        return self._given(slice_)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete the operation; ``LostRankError`` names a rank that has ended or did not respond in time."""
        if not self.done:
            limit = timeout.total_seconds() if timeout else 0
            self._members.wait_for(self._what, self._number, self._attempt, limit if limit > 0 else self.limit)
            self.done = True
        return True

    def is_completed(self) -> bool:
        """Whether the operation is complete or can be completed now."""
        self.done = self.done or self._attempt(0) == 0
        return self.done


class Finished(Pending):
    """The handle of a complete operation, or of one that completes with other handles and a final step."""

    def __init__(
        self, filled: list[Tensor], works: Sequence[dist.Work] = (), final_step: Callable[[], object] | None = None
    ) -> None:
        FilledWork.__init__(self, filled)
        self._parts = works
        self._last = final_step
        self.done = not works and final_step is None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete the parts, then run the final step."""
        if not self.done:
            for work in self._parts:
                work.wait(timeout) if timeout else work.wait()
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether the operation is complete or can be completed now."""
        if not self.done and all([work.is_completed() for work in self._parts]):
            self._finish()
        return self.done

    def _finish(self) -> None:
        if self._last:
            self._last()
        self.done = True
