"""Times of an interval by phase and transfer, and their estimate where transfers are not timed one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OTHER = "other"
"""Phase of time outside of all others."""
SAMPLED_EVERY = 10
"""Transfers are timed in one interval of this number, and in the first ``SAMPLED_FIRST`` ones."""
SAMPLED_FIRST = 3


@dataclass
class Traffic:
    """Totals of one kind of collective over one group."""

    calls: int = 0
    bytes: float = 0.0
    exposed: float = 0.0
    """Seconds in which this rank only waited."""
    in_flight: float = 0.0
    """Seconds between the calls and the ends of their waits."""


@dataclass
class StepTimes:
    """Times of one rank over an interval, in seconds."""

    phases: dict[str, float] = field(default_factory=dict)
    """By phase, without collectives; the sum of these and of all ``exposed`` is ``seconds``."""
    traffic: dict[str, Traffic] = field(default_factory=dict)
    """By group and kind, such as ``tp all_reduce``; ``host`` and ``disk`` are transfers of offloading."""
    seconds: float = 0.0

    def add(self, other: StepTimes) -> None:
        """Add the times of another interval."""
        self.seconds += other.seconds
        for name, seconds in other.phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        for name, more in other.traffic.items():
            total = self.traffic.setdefault(name, Traffic())
            total.calls, total.bytes = total.calls + more.calls, total.bytes + more.bytes
            total.exposed, total.in_flight = total.exposed + more.exposed, total.in_flight + more.in_flight


class Sampling:
    """Decides in which intervals of a GPU transfers are timed, and estimates their times in the others."""

    def __init__(self) -> None:
        self.is_on = True
        """Whether transfers are timed now."""
        self._was_on = True
        """Whether they were in the interval that has ended."""
        self._intervals = 0
        self._shares: dict[str, dict[str, float]] = {}
        """Shares of each phase in which this rank only waited, by kind of transfer, in the last sampled interval."""
        self._flight: dict[str, float] = {}
        """Seconds in flight per call of each kind of transfer, in the last sampled interval."""

    def end_interval(self, *, times_next: bool) -> None:
        """An interval ends; ``times_next``: transfers of the next one are timed in any case."""
        self._intervals += 1
        self._was_on = self.is_on
        self.is_on = times_next or self._intervals < SAMPLED_FIRST or self._intervals % SAMPLED_EVERY == 0

    def complete(self, times: StepTimes, exposed: Mapping[tuple[str, str], float]) -> None:
        """Store the shares of a sampled interval, or divide the phases of another one by the stored shares.

        ``exposed``: seconds in which this rank only waited, by phase and transfer.
        """
        if not self._was_on:
            return self._estimate(times)
        whole = dict(times.phases)
        for (phase, _), seconds in exposed.items():
            whole[phase] = whole.get(phase, 0.0) + seconds
        self._shares = {}
        for (phase, name), seconds in exposed.items():
            self._shares.setdefault(phase, {})[name] = seconds / whole[phase] if whole[phase] else 0.0
        self._flight = {name: traffic.in_flight / max(traffic.calls, 1) for name, traffic in times.traffic.items()}

    def _estimate(self, times: StepTimes) -> None:
        for phase, seconds in list(times.phases.items()):
            for name, share in self._shares.get(phase, {}).items():
                if name in times.traffic:
                    times.phases[phase] -= share * seconds
                    times.traffic[name].exposed += share * seconds
        for name, traffic in times.traffic.items():
            traffic.in_flight = max(traffic.in_flight, traffic.calls * self._flight.get(name, 0.0))
