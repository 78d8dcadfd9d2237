"""Summary of a run's records: time of each rank by phase, with waiting and sending separated, and goodput."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from megatron_core.planner.hardware import Hardware
from megatron_core.reports.goodput import Goodput
from megatron_core.reports.metrics import STARVED_SHARE, RunRecords, recorded_loads
from megatron_core.reports.timers import COMPUTE

WARM_UP = 2
"""Steps after a start that are ignored if more follow: they include loading libraries and first use of memory."""
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
    """Seconds of forward and backward per step, for each record."""

    @property
    def compute(self) -> float:
        """Seconds of forward and backward, without exposed collectives."""
        return sum(self.phases.get(name, 0.0) for name in COMPUTE)

    @property
    def typical_compute(self) -> float:
        """Seconds of forward and backward per step: the median over records, which is robust to outliers."""
        return median(self.each_compute) if self.each_compute else 0.0

    def add(self, record: dict[str, Any]) -> None:
        """Add a record."""
        steps = record["last"] - record["first"] + 1
        self.steps += steps
        self.each_compute.append(sum(record["phases"].get(name, 0.0) for name in COMPUTE) / steps)
        self.seconds += record["seconds"]
        for name, seconds in record["phases"].items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        for name, traffic in record["traffic"].items():
            sums = self.traffic.setdefault(name, dict.fromkeys(traffic, 0.0))
            for key, value in traffic.items():
                sums[key] += value


@dataclass(frozen=True)
class RunSummary:
    """Input of the rules of a diagnosis and of the report."""

    records: RunRecords
    ranks: dict[int, RankTimes]
    """Times after the warm-up in the last layout of the run, by rank."""
    goodput: Goodput
    machine: Hardware | None = None
    """The machine, for predictions; None: the machine in the records."""

    @classmethod
    def of(cls, records: RunRecords, machine: Hardware | None = None) -> "RunSummary":
        """Summarize the records of a run."""
        goodput = Goodput()
        for line in records.ranks.get(min(records.ranks, default=0), []):
            goodput.add(line)
        change = max((_last_of_others(lines) for lines in records.ranks.values()), default=0.0)
        ranks = {rank: _times(lines, change) for rank, lines in records.ranks.items()}
        return cls(records, {rank: times for rank, times in ranks.items() if times.steps}, goodput, machine)

    @property
    def config(self) -> dict[str, Any]:
        """The settings in the records of rank 0; empty without these records."""
        return self.records.header(0).get("config", {})

    @property
    def step_seconds(self) -> float:
        """Mean time of a step, including evaluations and saves."""
        times = list(self.ranks.values())
        return sum(t.seconds for t in times) / max(sum(t.steps for t in times), 1)

    def share(self, phase: str) -> float:
        """Share of a phase in the time of all ranks."""
        return self._part(times.phases.get(phase, 0.0) for times in self.ranks.values())

    @property
    def compute_share(self) -> float:
        """Share of forward and backward in the time of all ranks."""
        return self._part(times.compute for times in self.ranks.values())

    @property
    def scaling_efficiency(self) -> float:
        """Share of the ranks' time in which they do not wait for messages of other ranks."""
        exposed = (sum(traffic["exposed"] for traffic in times.traffic.values()) for times in self.ranks.values())
        return 1.0 - self._part(exposed)

    def worst_share(self, phase: str) -> tuple[float, int]:
        """Largest share of a phase in a rank's time, and this rank, for which the others wait."""
        shares = {rank: t.phases.get(phase, 0.0) / t.seconds for rank, t in self.ranks.items() if t.seconds}
        worst = max(shares, key=lambda rank: shares[rank], default=0)
        return shares.get(worst, 0.0), worst

    def coordinate(self, rank: int, axis: str) -> int:
        """Index of a rank on an axis."""
        return self.records.header(rank).get("coordinates", {}).get(axis, 0)

    def name(self, rank: int) -> str:
        """Name of a rank in messages."""
        header = self.records.header(rank)
        axes = " ".join(
            f"{axis}{index}" for axis, index in header.get("coordinates", {}).items() if axis in "pp dp cp tp"
        )
        return f"rank {rank} [{axes}] on {header.get('host', 'an unknown host')}"

    def groups(self, traffic: str) -> Iterator[list[int]]:
        """Yield the recorded ranks of each group with collectives of a kind such as ``tp all_reduce``.

        Each rank is a group of its own for transfers to host memory and files, such as ``disk read``.
        """
        axes = set(traffic.split(" ")[0].split("-"))
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, times in self.ranks.items():
            if traffic in times.traffic:
                position = self.records.header(rank).get("coordinates", {})
                view = ("etp", "ep", "edp", "pp") if axes & {"etp", "ep", "edp"} else ("tp", "cp", "dp", "pp")
                known = axes <= set(view)
                coordinates = tuple(position.get(axis, 0) for axis in view if known and axis not in axes)
                coordinates = (rank,) if axes & {"host", "disk"} else coordinates
                groups.setdefault(coordinates, []).append(rank)
        yield from groups.values()

    def communication(self) -> dict[str, tuple[float, float]]:
        """Shares of all ranks' time spent exchanging data and waiting for other ranks, by kind of collective.

        A collective ends at the same time on all its ranks. Its shortest time, on the last rank that joins, is the
        exchange of data; the additional time on other ranks is waiting. If the last rank changes from collective to
        collective, waiting is underestimated.
        """
        shares = {}
        for collective in dict.fromkeys(name for times in self.ranks.values() for name in times.traffic):
            sending = waiting = 0.0
            for group in self.groups(collective):
                exposed = [self.ranks[rank].traffic[collective]["exposed"] for rank in group]
                sending += min(exposed) * len(group)
                waiting += sum(exposed) - min(exposed) * len(group)
            shares[collective] = self._part([sending]), self._part([waiting])
        return shares

    def rates(self, collective: str) -> dict[tuple[int, ...], float]:
        """Bytes per second sent by a rank during collectives of a kind, by group."""
        rates = {}
        for group in self.groups(collective):
            quickest = min(self.ranks[rank].traffic[collective]["in_flight"] for rank in group)
            sent = median(self.ranks[rank].traffic[collective]["bytes"] for rank in group)
            if quickest > 0 and sent > 0:
                rates[tuple(group)] = sent / quickest
        return rates

    def unequal_layers(self) -> dict[str, tuple[float, list[int]]]:
        """Layers with unequal expert loads in the last 20 steps: largest / mean load, and starved experts."""
        loads = recorded_loads(self.records.steps()[-20:])
        layers = {}
        for layer in loads[-1] if loads else ():
            worst = mean(load[layer]["max_over_mean"] for load in loads)
            tokens = [sum(counts) for counts in zip(*(load[layer]["tokens"] for load in loads), strict=True)]
            starved = [e for e, n in enumerate(tokens) if n < STARVED_SHARE * mean(tokens)]
            if worst >= 1.5 or starved:
                layers[layer] = worst, starved
        return layers

    def mean(self, name: str) -> float | None:
        """Mean of a field over the steps after the warm-up; None if no step has it."""
        steps = self.records.steps()
        values = [step[name] for step in (steps[WARM_UP:] or steps) if step.get(name) is not None]
        return sum(values) / len(values) if values else None

    def _part(self, seconds: Iterable[float]) -> float:
        total = sum(times.seconds for times in self.ranks.values())
        return sum(seconds) / total if total else 0.0


def _last_of_others(lines: list[dict[str, Any]]) -> float:
    """Time of a rank's last record in a layout other than its last layout."""
    times = [0.0]
    layout = None
    for line in reversed(lines):
        if line["kind"] == "start":
            description = [line.get(name) for name in ("world_size", "coordinates", "work")]
            layout = layout or description
            if description != layout:
                return max(times)
            times = [0.0]
        else:
            times.append(line["at"])
    return 0.0


def _times(lines: list[dict[str, Any]], change: float) -> RankTimes:
    """Sum one rank's records after the last change of layout, without warm-up unless there are no other records."""
    warm = RankTimes()
    cold = RankTimes()
    since = 0
    other = False
    for line in lines:
        if line["kind"] == "start":
            since = 0
            other = line.get("began", change) < change
            continue
        if other or line["last"] < line["first"]:
            continue  # the final save and evaluation, which dominate a short run
        (cold if since < WARM_UP else warm).add(line)
        since += line["last"] - line["first"] + 1
    return warm if warm.steps else cold
