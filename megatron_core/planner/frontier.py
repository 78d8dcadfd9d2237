"""The points of a search that are not decided yet, and the time that is left for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from megatron_core.planner.layout_settings import Settings


@dataclass(frozen=True)
class Group:
    """Points with the same layers, which differ in their stages."""

    settings: Settings
    """All settings but those of the stages."""
    room: int
    """Ranks for stages and replicas."""


@dataclass
class Frontier:
    """Groups and points in the order of a lower bound of their time. Groups are divided only when their turn comes:
    a thousand devices have a million points."""

    expand: Callable[[float, Group], Iterable[tuple[float, Settings]]]
    """The points of a group and their bounds, which are at least that of the group."""
    _queue: list[tuple[float, int, Group | Settings]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def add(self, bound: float, entry: Group | Settings) -> None:
        """Add a group or a point."""
        heapq.heappush(self._queue, (bound, next(self._numbers), entry))

    def pop(self) -> tuple[float, Settings] | None:
        """The point with the smallest bound, or None if none is left."""
        while self._queue:
            bound, _, entry = heapq.heappop(self._queue)
            if not isinstance(entry, Group):
                return bound, entry
            for own_bound, point in self.expand(bound, entry):
                self.add(own_bound, point)
        return None


@dataclass
class TimeLimit:
    """The seconds of a search; ``clock`` returns the time in seconds."""

    seconds: float
    clock: Callable[[], float]
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    def passed(self, share: float = 1.0) -> bool:
        """Whether this share of the seconds has passed."""
        return self.clock() - self.began >= share * self.seconds
