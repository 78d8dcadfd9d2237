"""Estimates times of transfers on a GPU in intervals in which they are not timed one by one."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_core.parallel.meter import StepTimes

SAMPLED_EVERY = 10
"""Transfers are timed in one interval of this number, and in the first ``SAMPLED_FIRST`` ones."""
SAMPLED_FIRST = 3


class Sampling:
    """Decides in which intervals of a GPU transfers are timed, and estimates their times in the others."""

    def __init__(self) -> None:
        self._is_on = True
        """Whether transfers are timed now."""
        self._was_on = True
        """Whether they were in the interval that has ended."""
        self._intervals = 0
        self._shares: dict[str, dict[str, float]] = {}
        """Shares of each phase in which this rank only waited, by kind of transfer, in the last sampled interval."""
        self._flight: dict[str, float] = {}
        """Seconds in flight per call of each kind of transfer, in the last sampled interval."""

    def end_interval(self) -> bool:
        """An interval ends; return whether to time the transfers of the next one."""
        self._intervals += 1
        self._was_on = self._is_on
        self._is_on = self._intervals < SAMPLED_FIRST or self._intervals % SAMPLED_EVERY == 0
        return self._is_on

    def complete(self, times: StepTimes, exposed: Mapping[tuple[str, str], float]) -> None:
        """Store the shares of a sampled interval, or divide the phases of another one by the stored shares.

        ``exposed``: seconds in which this rank only waited, by phase and transfer.
        """
        if not self._was_on:
            return self._estimate(times)
        all_seconds = dict(times.phases)
        for (phase, _), seconds in exposed.items():
            all_seconds[phase] = all_seconds.get(phase, 0.0) + seconds
        self._shares = {}
        for (phase, name), seconds in exposed.items():
            self._shares.setdefault(phase, {})[name] = seconds / all_seconds[phase] if all_seconds[phase] else 0.0
        self._flight = {name: traffic.in_flight / max(traffic.calls, 1) for name, traffic in times.traffic.items()}

    def _estimate(self, times: StepTimes) -> None:
        for phase, seconds in list(times.phases.items()):
            for name, share in self._shares.get(phase, {}).items():
                if name in times.traffic:
                    times.phases[phase] -= share * seconds
                    times.traffic[name].exposed += share * seconds
        for name, traffic in times.traffic.items():
            traffic.in_flight = max(traffic.in_flight, traffic.calls * self._flight.get(name, 0.0))
