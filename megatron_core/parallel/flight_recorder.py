"""Records this rank's latest collectives and messages, to explain a hang."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel.rank_local import Forwarding, RankLocal

Note = tuple[str, str, tuple[int, ...], Any]
"""Channel, kind, shape and dtype of a call."""
KEPT = 64
"""Number of calls that are kept; if ranks differ by more, only their counts are compared."""


@dataclass(frozen=True)
class Call:
    """One collective or point-to-point message."""

    channel: str
    """Identifies a group, or a sender and its receiver; all of its ranks must make the same calls in the same order."""
    ranks: tuple[int, ...]
    number: int
    """Number of the call in its channel, from 1."""
    what: str
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    """Time of the call on this host's clock."""

    def __str__(self) -> str:
        """Kind, shape and dtype of the call."""
        return f"{self.what} of {list(self.shape)} {self.dtype}"

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Call:
        """Rebuild a ``Call`` from its ``asdict`` form in JSON."""
        return cls(**{**content, "ranks": tuple(content["ranks"]), "shape": tuple(content["shape"])})


class FlightRecorder:
    """Counts the calls of each channel and keeps the latest ones."""

    def __init__(self) -> None:
        # Bounded and of plain tuples, because each collective of every run adds one, and only the report of a hang
        # reads them.
        self._calls: deque[tuple[str, int, str, tuple[int, ...], Any, float]] = deque(maxlen=KEPT)
        self._captured: list[Note] | None = None
        self._counts: dict[str, int] = defaultdict(int)
        self._channels: dict[dist.ProcessGroup, str] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}

    @property
    def last(self) -> float:
        """Time of the latest call; 0 if there was none."""
        return self._calls[-1][-1] if self._calls else 0.0

    def note(self, what: str, group: dist.ProcessGroup, x: Tensor) -> None:
        """Record a collective over ``group``."""
        # Ranks of one group list the same members, so the list is a name that all of them agree on; groups' own names
        # differ.
        if group not in self._channels:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._channels[group] = str(list(ranks))
            self._ranks[self._channels[group]] = ranks
        self._add(self._channels[group], what, x)

    def note_message(self, sender: int, receiver: int, x: Tensor) -> None:
        """Record a message that this rank sends or receives; ranks are global."""
        channel = f"{sender}>{receiver}"
        self._ranks[channel] = (sender, receiver)
        self._add(channel, f"message from rank {sender} to {receiver}", x)

    @contextmanager
    def capturing(self) -> Iterator[list[Note]]:
        """Collect the calls of a CUDA graph instead of recording them, for ``repeat`` at each replay."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def repeat(self, notes: Iterable[Note]) -> None:
        """Record the calls of a replay."""
        for note in notes:
            self._count(*note)

    def _add(self, channel: str, what: str, x: Tensor) -> None:
        note = channel, what, tuple(x.shape), x.dtype
        if self._captured is None:
            self._count(*note)
        else:
            self._captured.append(note)

    def _count(self, channel: str, what: str, shape: tuple[int, ...], dtype: Any) -> None:
        self._counts[channel] += 1
        # A monotonic clock: it is only compared with times of this host, and changes of the system's clock would break
        # the order.
        self._calls.append((channel, self._counts[channel], what, shape, dtype, time.monotonic()))

    def content(self) -> dict[str, Any]:
        """Counts by channel, the ranks of each channel and the latest calls, in a form that JSON can store."""
        calls = [
            asdict(Call(channel, self._ranks[channel], number, what, shape, str(dtype).removeprefix("torch."), seconds))
            for channel, number, what, shape, dtype, seconds in list(self._calls)
        ]
        return {"counts": dict(self._counts), "ranks": {k: list(v) for k, v in self._ranks.items()}, "calls": calls}


RECORDER: FlightRecorder = cast(FlightRecorder, Forwarding(RankLocal(FlightRecorder)))
"""The recorder of this rank."""


def first_differing_call(records: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe the earliest call in which ranks differ, given the ``content`` of each rank; None if they agree."""
    channels = {name: tuple(r) for content in records.values() for name, r in content["ranks"].items()}
    differences = [_difference(name, ranks, records) for name, ranks in channels.items()]
    return min((d for d in differences if d is not None), default=(0.0, None))[1]


def _difference(
    channel: str, ranks: Sequence[int], records: Mapping[int, Mapping[str, Any]]
) -> tuple[float, str] | None:
    """Time and description of the first call in which the ranks of a channel differ; None if they agree."""
    members = {rank: records[rank] for rank in ranks if rank in records}
    calls: dict[int, dict[int, Call]] = defaultdict(dict)
    for rank, content in members.items():
        for call in (Call.of(stored) for stored in content["calls"] if stored["channel"] == channel):
            calls[call.number][rank] = call
    counts = {rank: content["counts"].get(channel, 0) for rank, content in members.items()}
    # A rank that is behind is as much a difference as another kind of call: the others wait for it.
    for number, calls_by_rank in sorted(calls.items()):
        kinds: dict[str, list[int]] = defaultdict(list)
        for rank, call in calls_by_rank.items():
            kinds[str(call)].append(rank)
        behind = [rank for rank, count in counts.items() if count < number]
        if len(kinds) == 1 and not behind:
            continue
        listing = " but ".join(f"{label} by {_named(by)}" for label, by in sorted(kinds.items()))
        missing = f", and not by {_named(behind)}, which made {min(counts[r] for r in behind)} calls" if behind else ""
        when = min(call.seconds for call in calls_by_rank.values())
        return when, f"call {number} over ranks {list(ranks)} was {listing}{missing}"
    return None


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
