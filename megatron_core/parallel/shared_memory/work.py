"""Waiting for other ranks: handles, time limits, and errors that name who is missing."""

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel.shared_memory.host import Peer

SLICE = 100_000
"""Microseconds between looks at signals, time limits and whether the others still run."""
KINDS = ("barrier", "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "send")
"""By the numbers of csrc/cpu/transport/transport.h."""

Attempt = Callable[[int], int]
"""Completes an operation within so many microseconds: 0, or 1 + the member of the group that has not come, or -1 - the
member that has posted something else."""


class LostRankError(dist.DistBackendError):
    """Another rank has ended, or does not come."""


class Members:
    """The ranks of a group as processes of this host."""

    def __init__(self, ranks: Sequence[int], peers: Sequence[Peer], timeout: timedelta, native: Any) -> None:
        self.ranks, self._peers, self._native = list(ranks), list(peers), native
        self.limit = timeout.total_seconds()
        self.group = 0
        """The native group, once it is made."""

    def wait_for(self, what: str, number: int, attempt: Attempt, limit: float) -> None:
        """Make attempts until one completes; ``LostRankError`` if the missing rank has ended, or ``limit`` seconds
        are over."""
        missing = attempt(SLICE)
        if missing == 0:
            return
        deadline = time.monotonic() + limit - SLICE / 1e6
        while missing:
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
                    f"has not come within {limit:.0f} s; if it is only slow, raise distributed_timeout_minutes"
                )
            missing = missing and attempt(min(SLICE, left))

    def _mismatch(self, what: str, number: int, member: int) -> str:
        """What a member has posted instead of what this rank waits for."""
        found = (ctypes.c_int64 * 5)()
        self._native.posted(self.group, member, 0, number, found)
        kind, dtype, reduction, root, size = found
        return (
            f"{what} over ranks {self.ranks}: rank {self.ranks[member]} has called {KINDS[kind]} (dtype {dtype}, "
            f"reduction {reduction}, root {root}, {size} bytes) instead, or with other sizes; all ranks of a group "
            "have to call the same collectives in the same order"
        )


class Pending(dist.Work):
    """The handle of an operation that has been posted."""

    def __init__(self, members: Members, what: str, number: int, attempt: Attempt | None, filled: list[Tensor]) -> None:
        super().__init__()
        self._members, self._what, self._number, self._filled = members, what, number, filled
        self._given, self.limit = attempt, members.limit
        self.done = False

    def _attempt(self, slice_: int) -> int:
        """As ``Attempt``. A subclass overrides it: a method of its own in an attribute would be a cycle, and what it
        has filled would stay in memory until the garbage collector comes."""
        assert self._given is not None, "a handle without an attempt overrides this"
        return self._given(slice_)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete it; ``LostRankError`` names a rank that has ended or does not come in time."""
        if not self.done:
            limit = timeout.total_seconds() if timeout else 0
            self._members.wait_for(self._what, self._number, self._attempt, limit if limit > 0 else self.limit)
            self.done = True
        return True

    def is_completed(self) -> bool:
        """Whether it is done, or can be completed now."""
        self.done = self.done or self._attempt(0) == 0
        return self.done

    def is_success(self) -> bool:
        """Whether it is done."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """What it has filled."""
        self.wait()
        return self._filled

    def get_future(self) -> torch.futures.Future:
        """A future that is done already: there is no thread that would complete it later."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


class Finished(Pending):
    """The handle of what is done, or is done by completing other handles and a last step."""

    def __init__(
        self, filled: list[Tensor], parts: Sequence[dist.Work] = (), last: Callable[[], object] | None = None
    ) -> None:
        dist.Work.__init__(self)
        self._filled, self._parts, self._last = filled, parts, last
        self.done = not parts and last is None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete the parts, then take the last step."""
        if not self.done:
            for part in self._parts:
                part.wait(timeout) if timeout else part.wait()
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether it is done, or can be completed now."""
        if not self.done and all([part.is_completed() for part in self._parts]):
            self._finish()
        return self.done

    def _finish(self) -> None:
        if self._last:
            self._last()
        self.done = True
