"""A run's records in numbers: each rank's time by phase, waiting told from sending, and how far the run came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from megatron_core.monitor.expert_load import STARVED_SHARE, recorded_loads
from megatron_core.monitor.goodput import Goodput
from megatron_core.monitor.rank_records import RunRecords
from megatron_core.monitor.timers import COMPUTE
from megatron_core.planner.hardware import Hardware

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
    each_compute: list[float] = field(default_factory=list)
    """Forward and backward of a step, stretch by stretch."""

    @property
    def compute(self) -> float:
        """Forward and backward, without waiting for collectives."""
        return sum(self.phases.get(name, 0.0) for name in COMPUTE)

    @property
    def typical_compute(self) -> float:
        """The same of a step: the median over stretches, which no single disturbance moves."""
        return median(self.each_compute) if self.each_compute else 0.0

    def add(self, record: dict[str, Any]) -> None:
        """Add a stretch."""
        steps = record["last"] - record["first"] + 1
        self.steps += steps
        self.each_compute.append(sum(record["phases"].get(name, 0.0) for name in COMPUTE) / steps)
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
    """Times after the warm-up, by rank, in the last layout that the run had."""
    goodput: Goodput
    machine: Hardware | None = None
    """The machine, for predictions; None: the one that the records name."""

    @classmethod
    def of(cls, records: RunRecords, machine: Hardware | None = None) -> Summary:
        """The numbers of a run."""
        goodput = Goodput()
        for line in records.ranks.get(min(records.ranks, default=0), []):
            goodput.add(line)
        change = max((_last_of_others(lines) for lines in records.ranks.values()), default=0.0)
        ranks = {rank: _times(lines, change) for rank, lines in records.ranks.items()}
        return cls(records, {rank: times for rank, times in ranks.items() if times.steps}, goodput, machine)

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

    def unequal_layers(self) -> dict[str, tuple[float, list[int]]]:
        """By layer with unequal loads of late: the largest over the mean one, and the experts that starve."""
        loads = recorded_loads(self.records.steps()[-20:])
        found = {}
        for layer in loads[-1] if loads else ():
            worst = mean(load[layer]["max_over_mean"] for load in loads)
            tokens = [sum(each) for each in zip(*(load[layer]["tokens"] for load in loads), strict=True)]
            starved = [e for e, n in enumerate(tokens) if n < STARVED_SHARE * mean(tokens)]
            if worst >= 1.5 or starved:
                found[layer] = worst, starved
        return found

    def mean(self, name: str) -> float | None:
        """The mean of a number in the steps after the warm-up; None if none has it."""
        steps = self.records.steps()
        values = [step[name] for step in (steps[WARM_UP:] or steps) if step.get(name) is not None]
        return sum(values) / len(values) if values else None

    def _part(self, seconds: Iterable[float]) -> float:
        whole = sum(times.seconds for times in self.ranks.values())
        return sum(seconds) / whole if whole else 0.0


def _last_of_others(lines: list[dict[str, Any]]) -> float:
    """When a rank last wrote as part of another layout than its present one."""
    found, layout = [0.0], None
    for line in reversed(lines):
        if line["kind"] == "start":
            own = [line.get(name) for name in ("world_size", "coordinates", "work")]
            layout = layout or own
            if own != layout:
                return max(found)
            found = [0.0]
        else:
            found.append(line["at"])
    return 0.0


def _times(lines: list[dict[str, Any]], change: float) -> RankTimes:
    """The stretches of one rank after the last change of layout, without warm-ups unless there is nothing else."""
    warm, cold, since, other = RankTimes(), RankTimes(), 0, False
    for line in lines:
        if line["kind"] == "start":
            since, other = 0, line.get("began", change) < change
            continue
        if other or line["last"] < line["first"]:
            continue  # the last save and evaluation: no part of a step, and much of a short run
        (cold if since < WARM_UP else warm).add(line)
        since += line["last"] - line["first"] + 1
    return warm if warm.steps else cold
