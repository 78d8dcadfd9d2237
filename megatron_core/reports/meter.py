"""Splits a rank's time into phases that add up to the total, and counts bytes of collectives and offloading.

Time is charged to exactly one phase, so the phases of a step sum to its duration. A collective is charged only while
this rank waits for it; while it overlaps with computation, time is charged to the computation, and the collective's
time in flight is reported separately. The same holds for transfers to host memory and files (``transfer.Lane``).
"""

# Bytes are those that a rank sends in a ring algorithm: of n ranks 2 (n-1)/n x for an all-reduce of x bytes, (n-1)/n x
# for other collectives. Divided by time, they compare with a link's bandwidth (NVIDIA's nccl-tests, "bus bandwidth").
# On a GPU, times are CUDA events. Reading the last one would wait for the device a second time in each step; therefore
# an interval ends at the step's only wait (``settle``), and the update counts for the next interval. Collectives have
# events in one of ten intervals only: 32 layers and 16 micro-batches record 25,000 events in a step.

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from megatron_core.parallel.groups import COMBINATIONS, Group, ParallelGroups
from megatron_core.parallel.meter import OTHER, RANK_METER, NoMeter, Waited
from megatron_core.parallel.rank_local import Forwarding


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

    def add(self, other: "StepTimes") -> None:
        """Add the times of another interval."""
        self.seconds += other.seconds
        for name, seconds in other.phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        for name, traffic in other.traffic.items():
            total = self.traffic.setdefault(name, Traffic())
            total.calls += traffic.calls
            total.bytes += traffic.bytes
            total.exposed += traffic.exposed
            total.in_flight += traffic.in_flight


@dataclass
class _Transfer:
    name: str
    bytes: float
    began: int
    ended: int | None = None
    detail: Any = None
    """Detail of the phase that started it."""
    label: str | None = None
    """Its contents, if traces show them."""
    flown: float = 0.0
    """Seconds in flight before the current interval."""
    waits: list[tuple[int, int]] = field(default_factory=list)
    """Intervals in which the rank only waited for it, by the indices of their first and last recorded time."""

    def ends_by(self, mark: int) -> bool:
        """Whether it has ended at the recorded time ``mark``."""
        return self.ended is not None and self.ended <= mark

    def rebase(self, mark: int) -> None:
        """Count indices from the recorded time ``mark``, up to which its time in flight has been added."""
        self.began = max(self.began - mark, 0)
        self.ended = None if self.ended is None else self.ended - mark
        self.waits = [(max(start - mark, 0), end - mark) for start, end in self.waits if end > mark]


@dataclass(frozen=True)
class PhaseSpan:
    """An interval of one phase in a trace, in seconds from the trace's start."""

    phase: str
    detail: Any
    start: float
    end: float
    waited: float = 0.0
    """Seconds of a transfer in which the rank only waited for it."""


class ChargedWait(Waited):
    """The handle of a collective; charges the duration of ``wait`` to it."""

    def __init__(self, meter: "Meter", work: Any, transfer: _Transfer) -> None:
        super().__init__(work)
        self._meter = meter
        self._transfer = transfer

    def wait(self, instead: Callable[[], object] | None = None) -> None:
        """Wait for the collective, by calling ``instead`` if it is given."""
        # Charged to the collective only here: while it overlaps with computation this rank does not lose time to it.
        before = self._meter.charged
        self._meter.switch(self._transfer.name, before[1])
        began = self._meter.last_mark
        super().wait(instead)
        self._meter.switch(*before)
        self._transfer.ended = self._meter.last_mark
        self._transfer.waits.append((began, self._transfer.ended))


class Sampler(Protocol):
    """Decides in which intervals transfers are timed, and estimates their times in the others."""

    def end_interval(self) -> bool:
        """An interval ends; return whether to time the transfers of the next one."""

    def complete(self, times: StepTimes, exposed: Mapping[tuple[str, str], float]) -> None:
        """Complete the ``times`` of the interval; ``exposed``: seconds of waiting by phase and transfer."""


class Meter(NoMeter):
    """Charges time to phases between ``start`` and ``stop``; otherwise its cost is one check of a flag."""

    def __init__(self) -> None:
        self.on = False
        # One list for all phases: intervals have neither gaps nor overlaps, and on a GPU a change costs one event.
        self._marks: list[tuple[str, Any, Any]] = []
        self._transfers: list[_Transfer] = []
        self._kinds: set[str] = set()
        """The phases that are collectives."""
        self._names: Mapping[Any, str] = {}
        self._label: str | None = None
        self._captured: list[tuple[str, float]] | None = None
        self._device = torch.device("cpu")
        self.keep_spans = False
        """Whether ``take`` stores the step's intervals in ``spans``."""
        self.spans: list[PhaseSpan] = []
        self.flights: list[PhaseSpan] = []
        """The collectives of ``spans``, each from its call to the end of its wait."""
        self._settled: int | None = None  # index of a time at which the device had completed all earlier work
        self._sampling: Sampler | None = None
        self._times_transfers = True

    def start(self, groups: ParallelGroups, device: torch.device, sampling: Sampler | None = None) -> None:
        """Start charging; collectives are named after ``groups``, and timed in intervals that ``sampling`` chooses."""
        self._names = group_names(groups)
        self._device = device
        self.on = True
        self.charged = (OTHER, None)
        self._transfers.clear()
        self._settled = None
        self._sampling = sampling
        self._times_transfers = True
        self._marks = [(OTHER, self._now(), None)]

    def stop(self) -> None:
        """Stop charging."""
        self.on = False

    @property
    def last_mark(self) -> int:
        """Index of the latest recorded time."""
        return len(self._marks) - 1

    def switch(self, phase: str, detail: Any = None) -> str:
        """``NoMeter.switch``, while the meter is on."""
        if not self.on:
            return phase
        before = self.charged[0]
        self.charged = (phase, detail)
        self._marks.append((phase, self._now(), detail))
        return before

    def mark(self) -> int:
        """Record the current time without a change of phase; return its index."""
        self.switch(*self.charged)
        return self.last_mark

    def settle(self) -> None:
        """The next ``take`` returns the times until now, when the host has just waited for the device."""
        if not self._marks or self._device.type != "cuda":
            return
        self._settled = self.last_mark
        if self._sampling is not None:
            self._times_transfers = self._sampling.end_interval() or self.keep_spans

    @contextmanager
    def times_all(self) -> Iterator[None]:
        """Time every transfer of the enclosed code, for a trace."""
        before = self._times_transfers
        self._times_transfers = True
        try:
            yield
        finally:
            self._times_transfers = before

    @contextmanager
    def phase(self, name: str, *, inclusive: bool = False) -> Iterator[None]:
        """``NoMeter.phase``, while the meter is on."""
        before = self.charged
        was_on = self.on
        self.switch(name, before[1])
        # Switched off, inner phases leave no times, and their time stays with the outer phase.
        self.on = was_on and not inclusive
        try:
            yield
        finally:
            self.on = was_on
            self.switch(*before)

    @contextmanager
    def labelled(self, label: str | None) -> Iterator[None]:
        """``NoMeter.labelled``."""
        before = self._label
        self._label = label
        try:
            yield
        finally:
            self._label = before

    @contextmanager
    def capturing(self) -> Iterator[list[tuple[str, float]]]:
        """``NoMeter.capturing``; nothing is charged: events on the stream would be part of the graph."""
        was_on = self.on
        self.on = False
        self._captured = []
        try:
            yield self._captured
        finally:
            self.on = was_on
            self._captured = None

    def run(self, operation: str, group: Any, sent: float, call: Callable[[], Any]) -> Any:
        """``NoMeter.run``, charged to the collective while this rank waits for it."""
        name = f"{group if isinstance(group, str) else self._names.get(group, OTHER)} {operation}"
        if self._captured is not None:
            self._captured.append((name, sent))
        if not self.on:
            return call()
        if not self._times_transfers:
            self._transfers.append(_Transfer(name, sent, 0, 0))
            return call()
        # ``began`` is the index of the time that the next switch records.
        transfer = _Transfer(name, sent, len(self._marks), detail=self.charged[1], label=self._label)
        self._transfers.append(transfer)
        self._kinds.add(transfer.name)
        before = self.charged
        self.switch(transfer.name, before[1])
        try:
            work = call()
        finally:
            self.switch(*before)
        transfer.waits.append((transfer.began, self.last_mark))
        # A synchronous collective: its time was exposed and is complete.
        if work is None:
            transfer.ended = self.last_mark
            return None
        return ChargedWait(self, work, transfer)

    def sent(self, operation: str, size: float) -> None:
        """Count a message that is not waited for here."""
        if self.on:
            self._transfers.append(_Transfer(operation, size, 0, 0))

    def waited(self) -> float:
        """Return the seconds since ``start`` or the last ``take`` in which this rank only waited for collectives.

        On a GPU this synchronizes.
        """
        moments = self._seconds()
        spans = zip(self._marks, moments, moments[1:], strict=False)
        return sum(end - start for (phase, _, _), start, end in spans if phase in self._kinds)

    def take(self) -> StepTimes:
        """Return the times since ``start`` or the last ``take``.

        On a GPU the interval ends at the last ``settle``; without one since the last ``take``, this synchronizes.
        """
        if self._settled is None:
            self._marks.append((self.charged[0], self._now(), None))
        # The end of this interval is the beginning of the next, so that no time is lost between two steps.
        end = self.last_mark if self._settled is None else self._settled
        moments = self._seconds(end)
        times = StepTimes(seconds=moments[-1])
        ended = [transfer for transfer in self._transfers if transfer.ends_by(end)]
        running = [transfer for transfer in self._transfers if not transfer.ends_by(end)]
        # A transfer may be in flight over several intervals, such as weights gathered for the next step.
        for transfer in ended:
            transfer.flown += moments[transfer.ended or 0] - moments[min(transfer.began, end)]
            traffic = times.traffic.setdefault(transfer.name, Traffic())
            traffic.calls += 1
            traffic.bytes += transfer.bytes
            traffic.in_flight += transfer.flown
        # The time in which this rank only waited, by the phase around the transfer and by transfer.
        exposed: dict[tuple[str, str], float] = {}
        outer = OTHER
        for (phase, _, _), start, stop in zip(self._marks, moments, moments[1:], strict=False):
            if phase in self._kinds:
                exposed[outer, phase] = exposed.get((outer, phase), 0.0) + stop - start
                times.traffic.setdefault(phase, Traffic()).exposed += stop - start
            else:
                outer = phase
                times.phases[phase] = times.phases.get(phase, 0.0) + stop - start
        if self._sampling is not None:
            self._sampling.complete(times, exposed)
        if self.keep_spans:
            bounds = zip(self._marks, moments, moments[1:], strict=False)
            self.spans = [PhaseSpan(phase, detail, start, stop) for (phase, _, detail), start, stop in bounds]
            self.flights = self._flights(moments)
        # A transfer still in flight is counted after its wait.
        for transfer in running:
            transfer.flown += moments[-1] - moments[min(transfer.began, end)]
            transfer.rebase(end)
        self._transfers = running
        self._marks = self._marks[end:]
        self._settled = None
        return times

    def flights_since(self, mark: int) -> list[PhaseSpan]:
        """Return the transfers that ended after the recorded time ``mark``, in seconds after it.

        On a GPU this synchronizes.
        """
        self.mark()
        moments = self._seconds()
        later_flights = (flight for flight in self._flights(moments) if flight.end > moments[mark])
        began = moments[mark]
        return [replace(flight, start=flight.start - began, end=flight.end - began) for flight in later_flights]

    def _flights(self, moments: list[float]) -> list[PhaseSpan]:
        """The transfers that have ended."""
        return [
            PhaseSpan(
                transfer.name if transfer.label is None else f"{transfer.name}: {transfer.label}",
                transfer.detail,
                moments[transfer.began],
                moments[transfer.ended],
                sum(moments[end] - moments[start] for start, end in transfer.waits),
            )
            for transfer in self._transfers
            if transfer.ended and transfer.ended < len(moments)
        ]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        # The host runs ahead of the GPU, so its clock would measure launches; events are read later.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, last: int | None = None) -> list[float]:
        """The recorded times in seconds from the first one, up to the mark ``last``; waits for its event if needed."""
        marks = self._marks if last is None else self._marks[: last + 1]
        first = marks[0][1]
        if self._device.type != "cuda":
            return [mark - first for _, mark, _ in marks]
        if last is None or last != self._settled:
            # Events of one stream complete in order, so waiting for the last is enough.
            marks[-1][1].synchronize()
        return [first.elapsed_time(mark) / 1000.0 for _, mark, _ in marks]


def _meter() -> Meter:
    """The meter of this rank, which from its first use on measures what the rank reports."""
    if not isinstance(RANK_METER(), Meter):
        RANK_METER.set(Meter())
    return cast(Meter, RANK_METER())


METER: Meter = cast(Meter, Forwarding(_meter))
"""The meter of this rank, which collectives and the pipeline executor report to."""


def group_names(groups: ParallelGroups) -> dict[Group, str]:
    """Names of this rank's groups; of several combinations with the same ranks, the shortest name."""
    names: dict[Group, str] = {}
    for axes in sorted(COMBINATIONS, key=lambda axes: axes.count("-")):
        if groups.group(axes).size() > 1:
            names.setdefault(groups.group(axes), axes)
    special = {"embedding": groups.embedding, "cp heads": groups.context.heads, "cp ring": groups.context.ring}
    special |= {"outer": groups.outer, "outer reports": groups.outer_reports}
    for name, group in special.items():
        if group is not None and group.size() > 1:
            names.setdefault(group, name)
    return names
