"""A run's records in numbers: each rank's time by phase, waiting told from sending, and how far the run came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron_core.monitor.goodput import Goodput
from megatron_core.monitor.rank_records import RunRecords
from megatron_core.monitor.timers import COMPUTE

WARM_UP = 2
"""Steps after a start that are left out where more follow: libraries load and memory is touched for the first time."""
OUTSIDE = ("checkpoint", "evaluation")
"""Phases between steps."""


@dataclass
class RankTimes:
    """Seconds of one rank in ``steps`` steps."""

    steps: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def compute(self) -> float:
        """Forward and backward, without waiting for collectives."""
        return sum(self.phases.get(name, 0.0) for name in COMPUTE)

    def add(self, record: dict[str, Any]) -> None:
        """Add a stretch."""
        self.steps += record["last"] - record["first"] + 1
        self.seconds += record["seconds"]
        for name, seconds in record["phases"].items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        for name, traffic in record["traffic"].items():
            own = self.traffic.setdefault(name, dict.fromkeys(traffic, 0.0))
            for key, value in traffic.items():
                own[key] += value


@dataclass(frozen=True)
class Summary:
    """What the rules of a diagnosis and a report read."""

    records: RunRecords
    ranks: dict[int, RankTimes]
    """Times after the warm-up, by rank."""
    goodput: Goodput

    @classmethod
    def of(cls, records: RunRecords) -> Summary:
        """The numbers of a run."""
        goodput = Goodput()
        for line in records.ranks.get(min(records.ranks, default=0), []):
            goodput.add(line)
        ranks = {rank: _times(lines) for rank, lines in records.ranks.items()}
        return cls(records, {rank: times for rank, times in ranks.items() if times.steps}, goodput)

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as rank 0 wrote them; empty without its records."""
        return self.records.header(0).get("config", {})

    @property
    def step_seconds(self) -> float:
        """Mean time of a step, with what happens between steps."""
        times = list(self.ranks.values())
        return sum(t.seconds for t in times) / max(sum(t.steps for t in times), 1)

    def share(self, phase: str) -> float:
        """The share of a phase in the time of all ranks."""
        return self._part(times.phases.get(phase, 0.0) for times in self.ranks.values())

    @property
    def compute_share(self) -> float:
        """The share of forward and backward."""
        return self._part(times.compute for times in self.ranks.values())

    def worst_share(self, phase: str) -> tuple[float, int]:
        """The largest share of a phase in one rank's time, and that rank: others wait for it."""
        shares = {rank: t.phases.get(phase, 0.0) / t.seconds for rank, t in self.ranks.items() if t.seconds}
        worst = max(shares, key=lambda rank: shares[rank], default=0)
        return shares.get(worst, 0.0), worst

    def coordinate(self, rank: int, axis: str) -> int:
        """The index of a rank on an axis."""
        return self.records.header(rank).get("coordinates", {}).get(axis, 0)

    def name(self, rank: int) -> str:
        """A rank as messages name it."""
        header = self.records.header(rank)
        axes = " ".join(f"{axis}{at}" for axis, at in header.get("coordinates", {}).items() if axis in "pp dp cp tp")
        return f"rank {rank} [{axes}] on {header.get('host', 'an unknown host')}"

    def groups(self, traffic: str) -> Iterator[list[int]]:
        """The ranks of each group that has collectives of a kind, as ``tp all_reduce``, as far as records are there."""
        axes = set(traffic.split(" ")[0].split("-"))
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, times in self.ranks.items():
            if traffic in times.traffic:
                own = self.records.header(rank).get("coordinates", {})
                view = ("etp", "ep", "edp", "pp") if axes & {"etp", "ep", "edp"} else ("tp", "cp", "dp", "pp")
                known = axes <= set(view)
                at = tuple(own.get(axis, 0) for axis in view if known and axis not in axes)
                found.setdefault(at, []).append(rank)
        yield from found.values()

    def communication(self) -> dict[str, tuple[float, float]]:
        """By kind of collective the shares of all ranks' time in which they exchange data, and in which they wait.

        A collective ends for all members together: the one that came last waits for the data alone, and what others
        take longer is waiting for it. Over many collectives with changing last ranks that share of waiting is too low.
        """
        found = {}
        for kind in dict.fromkeys(name for times in self.ranks.values() for name in times.traffic):
            sending = waiting = 0.0
            for group in self.groups(kind):
                exposed = [self.ranks[rank].traffic[kind]["exposed"] for rank in group]
                sending += min(exposed) * len(group)
                waiting += sum(exposed) - min(exposed) * len(group)
            found[kind] = self._part([sending]), self._part([waiting])
        return found

    def rates(self, kind: str) -> dict[tuple[int, ...], float]:
        """Bytes a second that a rank sends while collectives of a kind are on their way, by group."""
        found = {}
        for group in self.groups(kind):
            quickest = min(self.ranks[rank].traffic[kind]["in_flight"] for rank in group)
            sent = median(self.ranks[rank].traffic[kind]["bytes"] for rank in group)
            if quickest > 0 and sent > 0:
                found[tuple(group)] = sent / quickest
        return found

    def mean(self, name: str) -> float | None:
        """The mean of a number in the steps after the warm-up; None if none has it."""
        steps = self.records.steps()
        values = [step[name] for step in (steps[WARM_UP:] or steps) if step.get(name) is not None]
        return sum(values) / len(values) if values else None

    def _part(self, seconds: Iterable[float]) -> float:
        whole = sum(times.seconds for times in self.ranks.values())
        return sum(seconds) / whole if whole else 0.0


def _times(lines: list[dict[str, Any]]) -> RankTimes:
    """The stretches of one rank without those of a warm-up, unless there are no others."""
    warm, cold, since = RankTimes(), RankTimes(), 0
    for line in lines:
        if line["kind"] == "start":
            since = 0
            continue
        (cold if since < WARM_UP else warm).add(line)
        since += line["last"] - line["first"] + 1
    return warm if warm.steps else cold
