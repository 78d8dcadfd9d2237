"""The ranks' agreement after a failure: who failed, who is left, and from which iteration training continues.

All state is in a store that outlives the training processes. A generation is the time between two failures; it has one
set of process groups. Ranks here are those of the launcher. Every function returns immediately; its caller repeats it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Failure:
    """The first failure of a generation."""

    rank: int
    what: str
    """Description with the rank as the subject, such as ``rank 1 (process 77) was killed by SIGKILL``."""
    iteration: int
    """The running iteration of the rank; 0 before the first one."""
    at: float = field(default_factory=time.time)
    """Time of the detection, in seconds since 1970."""


@dataclass(frozen=True)
class Members:
    """The ranks of a generation and the iteration whose state they continue from; -1: none has all state."""

    ranks: tuple[int, ...]
    iteration: int
    fresh: tuple[int, ...]
    """Ranks whose process is new."""


@dataclass(frozen=True)
class End:
    """The end of the job, decided by one rank: the exit status and the reason."""

    status: int
    reason: str


def connection(store: Any) -> Any:
    """Another connection to ``store``, for another thread or process."""
    return store.clone()


class Meeting:
    """One process's view of the store; each thread needs its own."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size

    def clone(self) -> Meeting:
        """The same with a connection of its own, for another thread."""
        return Meeting(connection(self._store), self.rank, self.size)

    def fail(self, generation: int, failure: Failure) -> None:
        """Publish a failure, unless this generation has failed already."""
        self._first(f"{generation}/failed", json.dumps(asdict(failure)))

    def failure(self, generation: int) -> Failure | None:
        """The first failure of ``generation``, or None."""
        text = self._get(f"{generation}/failed")
        return None if text is None else Failure(**json.loads(text))

    def train(self, generation: int) -> None:
        """Report that the first step of ``generation`` starts."""
        self._store.set(f"{generation}/trains", "1")

    def failures(self, before: int) -> list[Failure]:
        """The failures that led to generation ``before``, since the last generation that has trained."""
        found = list[Failure]()
        for generation in range(before - 1, -1, -1):
            failure = self.failure(generation)
            found += [failure] if failure is not None else []
            if self._has(f"{generation}/trains"):
                break
        return found[::-1]

    def next_generation(self, after: int) -> int:
        """The first generation from ``after`` on that has not failed."""
        while self.failure(after) is not None:
            after += 1
        return after

    def arrive(self, generation: int, iterations: Sequence[int], *, fresh: bool) -> None:
        """Report that this rank is ready for ``generation`` and has the state of these ``iterations``."""
        self._store.set(f"{generation}/at/{self.rank}", json.dumps([list(iterations), fresh]))

    def absent(self, generation: int) -> list[int]:
        """Ranks that have not arrived, without those that are lost."""
        return [
            rank for rank in range(self.size) if not self._has(f"{generation}/at/{rank}") and not self.is_lost(rank)
        ]

    def members(self, generation: int) -> Members | None:
        """The members of ``generation``, once all ranks that are not lost have arrived; the same on all of them."""
        found = self.decided(generation)
        if found is None and not self.absent(generation):
            self._first(f"{generation}/members", json.dumps(asdict(self._count(generation))))
            found = self.decided(generation)
        return found

    def decided(self, generation: int) -> Members | None:
        """The members of ``generation`` if a rank has decided them."""
        text = self._get(f"{generation}/members")
        if text is None:
            return None
        found = json.loads(text)
        return Members(tuple(found["ranks"]), found["iteration"], tuple(found["fresh"]))

    def _count(self, generation: int) -> Members:
        there, fresh, iterations = [], [], list[set[int]]()
        for rank in range(self.size):
            text = None if self.is_lost(rank) else self._get(f"{generation}/at/{rank}")
            if text is not None:
                own, is_fresh = json.loads(text)
                there.append(rank)
                fresh += [rank] * is_fresh
                iterations.append(set(own))
        common = set.intersection(*iterations) if iterations else set()
        return Members(tuple(there), max(common, default=-1), tuple(fresh))

    def lose(self, rank: int) -> None:
        """Report that ``rank`` will not come back."""
        self._store.set(f"lost/{rank}", "1")

    def is_lost(self, rank: int) -> bool:
        """Whether ``rank`` will not come back."""
        return self._has(f"lost/{rank}")

    def finish(self, generation: int) -> None:
        """Report that this rank has completed the job."""
        self._store.set(f"{generation}/finished/{self.rank}", "1")

    def all_finished(self, generation: int, ranks: Collection[int]) -> bool:
        """Whether these ranks have completed the job."""
        return all(self._has(f"{generation}/finished/{rank}") for rank in ranks)

    def end(self, status: int, reason: str) -> None:
        """End the job, unless it has been ended already."""
        self._first("end", json.dumps([status, reason]))

    def ended(self) -> End | None:
        """The end of the job, or None."""
        text = self._get("end")
        return None if text is None else End(*json.loads(text))

    def beat(self) -> None:
        """Report that this rank's supervisor runs."""
        self._store.add(f"beats/{self.rank}", 1)

    def watched(self) -> tuple[int, int] | None:
        """The next rank whose supervisor has not left, and its number of beats; None if there is
        none."""
        for rank in (*range(self.rank + 1, self.size), *range(self.rank)):
            if not self._has(f"left/{rank}"):
                return rank, self._store.add(f"beats/{rank}", 0)
        return None

    def leave(self, rank: int | None = None) -> None:
        """Report that the supervisor of ``rank``, by default this one, no longer needs the store."""
        self._store.set(f"left/{self.rank if rank is None else rank}", "1")

    def all_left(self) -> bool:
        """Whether no supervisor needs the store."""
        return all(self._has(f"left/{rank}") for rank in range(self.size))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._has(key) else None

    def _first(self, key: str, value: str) -> str:
        """Set ``key`` unless it is set; returns its value."""
        return self._store.compare_set(key, "", value).decode()
