"""The ranks' agreement after a failure: who failed, who is left, and from which iteration training continues.

All state is in a store that outlives the training processes. A generation is the time between two failures; it has one
set of process groups. Ranks here are those of the launcher. Every function returns immediately; its caller repeats it.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import torch.distributed as dist

from megatron_core.parallel.meter import unix_time
from megatron_core.parallel.texts import listed
from megatron_core.resilience.processes.memory import Copy

NO_STATE, LOST_STATE = -1, -2
"""Iterations of ``Members``: no rank has begun to train; a part of the state has no copy left."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a generation."""

    rank: int
    what: str
    """Description with the rank as the subject, such as ``rank 1 (process 77) was killed by SIGKILL``."""
    iteration: int
    """The running iteration of the rank; 0 before the first one."""
    unix_seconds: float = field(default_factory=unix_time)
    """Time of the detection, in seconds since 1970."""
    first: int | None = None
    """The first step with wrong values, if they are the failure; the state before it is right."""
    ranks: tuple[int, ...] = ()
    """Ranks whose processes must not continue."""

    @classmethod
    def of(cls, text: str) -> "Failure":
        """The failure that ``text`` describes."""
        fields = json.loads(text)
        return cls(**fields | {"ranks": tuple(fields["ranks"])})


@dataclass(frozen=True)
class Members:
    """The ranks of a generation and the copies from which they continue."""

    ranks: tuple[int, ...]
    """All ranks that are present."""
    training: tuple[int, ...]
    """Ranks that train, in the order of their ranks in the process groups; the others wait."""
    iteration: int
    """The iteration of the copies; ``NO_STATE`` or ``LOST_STATE`` if there are none."""
    written: int
    """The generation in which the copies were written."""
    holders: dict[int, int]
    """The rank whose memory has the copy of each owner."""
    fresh: tuple[int, ...]
    """Ranks whose process is new."""
    rollbacks: int = 0
    """The number of rollbacks to a checkpoint before the copies were written."""

    @property
    def replacements(self) -> str:
        """A clause about the ranks whose process is new."""
        if len(self.fresh) > 1:
            return f"new processes take the place of ranks {listed(self.fresh)}"
        return f"a new process takes the place of rank {self.fresh[0]}" if self.fresh else "no process died"

    @property
    def copies(self) -> list[Copy]:
        """The copies from which the ranks continue."""
        return [Copy(owner, self.iteration, self.written, self.rollbacks) for owner in self.holders]

    @classmethod
    def of(cls, text: str) -> "Members":
        """The members that ``text`` describes."""
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("ranks", "training", "fresh")}
        return cls(**fields | lists | {"holders": {int(owner): rank for owner, rank in fields["holders"].items()}})


@dataclass(frozen=True)
class ChoiceRules:
    """Decides which of the present ranks train, and which copies are the whole state."""

    training: Callable[[Sequence[int]], tuple[int, ...]] = tuple
    suffices: Callable[[Sequence[int], Collection[int], Sequence[int]], bool] = lambda ranks, owners, training: (
        set(ranks) <= set(owners)
    )
    """Whether the copies of ``owners`` are the state that the ranks ``training`` need of a generation that was trained
    by ``ranks``."""


@dataclass(frozen=True)
class End:
    """The end of the job, decided by one rank: the exit status and the reason."""

    status: int
    reason: str


def connection(store: Any) -> Any:
    """Another connection to ``store``, for another thread or process."""
    return store.clone()


class Rendezvous:
    """One process's view of the store; each thread needs its own."""

    def __init__(self, store: dist.Store, rank: int, size: int, choice: ChoiceRules | None = None) -> None:
        """``choice`` must be equal on all ranks."""
        self._store = store
        self.rank = rank
        self.size = size
        self._choice = choice or ChoiceRules()

    def clone(self) -> "Rendezvous":
        """The same with a connection of its own, for another thread."""
        return Rendezvous(connection(self._store), self.rank, self.size, self._choice)

    def fail(self, generation: int, failure: Failure) -> None:
        """Publish a failure, unless this generation has failed already; wrong values also if it has."""
        text = json.dumps(asdict(failure))
        if failure.first is not None:
            self._first(f"{generation}/wrong", text)
        self._first(f"{generation}/failed", text)

    def die(self, generation: int, failure: Failure) -> None:
        """Publish the death of the process of ``failure.rank``, also if others of this generation have died before."""
        self._store.set(f"{generation}/died/{failure.rank}", failure.what)
        self.fail(generation, failure)

    def failure(self, generation: int) -> Failure | None:
        """The first failure of ``generation``, or None."""
        text = self._get(f"{generation}/failed")
        return None if text is None else Failure.of(text)

    def wrong(self, generation: int) -> Failure | None:
        """The failure of ``generation`` by wrong values, or None."""
        text = self._get(f"{generation}/wrong")
        return None if text is None else Failure.of(text)

    def train(self, generation: int) -> None:
        """Report that the first step of ``generation`` starts."""
        self._store.set(f"{generation}/trains", "1")

    def failures(self, before: int) -> list[Failure]:
        """The failures that led to generation ``before``, since the last generation that has trained: the first one of
        each generation, whose text also names the other processes that died."""
        failures = list[Failure]()
        for generation in range(before - 1, -1, -1):
            failure = self.failure(generation)
            if failure is not None:
                deaths = (self._get(f"{generation}/died/{rank}") for rank in range(self.size) if rank != failure.rank)
                texts = [failure.what, *(text for text in deaths if text is not None)]
                failures.append(replace(failure, what=" and ".join(texts)))
            if self._has(f"{generation}/trains"):
                break
        return failures[::-1]

    def next_generation(self, after: int) -> int:
        """The first generation from ``after`` on that has neither failed nor been replaced."""
        while self.failure(after) is not None or self.replaced(after) is not None:
            after += 1
        return after

    def arrive(self, generation: int, copies: Iterable[Copy], *, fresh: bool) -> None:
        """Report that this rank is ready for ``generation`` and that its memory has ``copies``."""
        self._store.set(f"{generation}/at/{self.rank}", json.dumps([list(copies), fresh]))

    def has_arrived(self, generation: int, rank: int) -> bool:
        """Whether ``rank`` is ready for ``generation``."""
        return self._has(f"{generation}/at/{rank}")

    def absent(self, generation: int) -> list[int]:
        """Ranks that have not arrived, without those that are lost."""
        return [rank for rank in range(self.size) if not self.has_arrived(generation, rank) and not self.is_lost(rank)]

    def members(self, generation: int) -> Members | None:
        """The members of ``generation``, once all ranks that are not lost have arrived; the same on all of them."""
        decided = self.decided(generation)
        if decided is None and not self.absent(generation):
            self._first(f"{generation}/members", json.dumps(asdict(self._count(generation))))
            decided = self.decided(generation)
        return decided

    def decided(self, generation: int) -> Members | None:
        """The members of ``generation`` if a rank has decided them."""
        text = self._get(f"{generation}/members")
        return None if text is None else Members.of(text)

    def _count(self, generation: int) -> Members:
        there = list[int]()
        fresh = list[int]()
        holders: dict[tuple[int, int, int], dict[int, int]] = {}  # by written, rollbacks and iteration
        for rank in range(self.size):
            lost = self.is_lost(rank)
            text = self._get(f"held/{rank}" if lost else f"{generation}/at/{rank}")
            copies, is_fresh = ([], False) if text is None else json.loads(text)
            if not lost:
                there.append(rank)
                fresh += [rank] * is_fresh
            for copy in map(Copy._make, copies):
                owners = holders.setdefault((copy.generation, copy.rollbacks, copy.iteration), {})
                if copy.owner not in owners or rank == copy.owner:
                    owners[copy.owner] = rank
        earlier = {number: self.decided(number) for number in range(generation)}
        failures = [(number, self.wrong(number)) for number in range(generation)]
        wrong = [(number, failure.first or 0) for number, failure in failures if failure is not None]
        usable = [
            ((written, rollbacks, iteration), owners)
            for (written, rollbacks, iteration), owners in sorted(holders.items(), reverse=True)
            if not any(written <= number and iteration >= first for number, first in wrong)
        ]
        # As many ranks as possible train; only without their state, fewer: those that have a copy of an iteration.
        training = self._choice.training(there)
        for only_owners in (False, True):
            for (written, rollbacks, iteration), owners in usable:
                writers = earlier.get(written)
                chosen = self._choice.training([r for r in there if r in owners]) if only_owners else training
                if chosen and writers is not None and self._choice.suffices(writers.training, owners, chosen):
                    return Members(tuple(there), chosen, iteration, written, owners, tuple(fresh), rollbacks)
        # All ranks copy their state before the first step is complete, after which one of them may have two copies.
        has_trained = any(number is not None and number.iteration >= 0 for number in earlier.values())
        has_trained |= len({iteration for _, _, iteration in holders}) > 1
        return Members(tuple(there), training, LOST_STATE if has_trained else NO_STATE, 0, {}, tuple(fresh))

    def replace(self, generation: int, iteration: int, what: str) -> None:
        """End ``generation`` after ``iteration``, when all its ranks have copied their state. ``what``: the reason."""
        self._first(f"{generation}/replaced", json.dumps([iteration, what]))

    def replaced(self, generation: int) -> tuple[int, str] | None:
        """The last iteration of a generation that ends without a failure, and the reason; None if it does not."""
        text = self._get(f"{generation}/replaced")
        return None if text is None else tuple(json.loads(text))

    def offer(self, address: tuple[str, int, str]) -> None:
        """Publish the address of this rank's keeper."""
        self._store.set(f"keeper/{self.rank}", json.dumps(address))

    def keeper(self, rank: int) -> tuple[str, int, str] | None:
        """The address of the keeper of ``rank``, if it has one."""
        text = self._get(f"keeper/{rank}")
        return None if text is None else tuple(json.loads(text))

    def ask_to_join(self) -> None:
        """Ask the training ranks to admit this lost rank again."""
        self._store.set(f"joins/{self.rank}", "1")
        self._store.add("joins", 1)

    def count_joins(self) -> int:
        """Number of requests of lost ranks to join again."""
        return int(self._store.add("joins", 0))

    def joining(self) -> list[int]:
        """Lost ranks that have asked to join again."""
        return [rank for rank in range(self.size) if self._has(f"joins/{rank}")]

    def take_in(self, ranks: Iterable[int]) -> None:
        """Expect ``ranks``, which have asked to join, at the next rendezvous."""
        for rank in ranks:
            for key in (f"joins/{rank}", f"left/{rank}", f"lost/{rank}"):
                self._store.delete_key(key)

    def lose(self, rank: int, copies: Iterable[Copy] = ()) -> None:
        """Report that ``rank`` cannot train. Its memory still has ``copies``."""
        self._store.set(f"held/{rank}", json.dumps([list(copies), False]))
        self._store.set(f"lost/{rank}", "1")

    def is_lost(self, rank: int) -> bool:
        """Whether ``rank`` cannot train."""
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

    def watched(self, count: int = 1) -> dict[int, int]:
        """The next ``count`` ranks whose supervisors have not left, in order, and their numbers of beats."""
        other_ranks = (*range(self.rank + 1, self.size), *range(self.rank))
        present = islice((rank for rank in other_ranks if not self._has(f"left/{rank}")), count)
        return {rank: self._store.add(f"beats/{rank}", 0) for rank in present}

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
