"""Splits a rank's time into phases that add up to the total, and counts bytes of collectives and offloading.

Time is charged to exactly one phase, so the phases of a step sum to its duration. A collective is charged only while
this rank waits for it; while it overlaps with computation, time is charged to the computation, and the collective's
time in flight is reported separately. The same holds for transfers to host memory and files (``transfer.Lane``). On a
GPU, times are CUDA events on the compute stream, read after they have completed.

"""

# Bytes are those that a rank sends in a ring algorithm: of n ranks 2 (n-1)/n x for an all-reduce of x bytes, (n-1)/n x
# for other collectives. Divided by time, they compare with a link's bandwidth (NVIDIA's nccl-tests, "bus bandwidth").

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from megatron_core.parallel.groups import COMBINATIONS, ParallelGroups
from megatron_core.parallel.rank_local import Forwarding, RankLocal

PROCESS_BEGAN = time.time()
_BEGAN = time.monotonic()
"""Unix time when this module was loaded; time between it and the first step is counted as lost to training."""
OTHER = "other"
COMPRESSED = "compressed gradients"
"""Label of messages with gradients that are rounded or approximated."""


def unix_time() -> float:
    """Seconds since 1970; after the start of the process, changes of the system's clock have no effect."""
    return PROCESS_BEGAN + time.monotonic() - _BEGAN


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
            total.calls = total.calls + more.calls
            total.bytes = total.bytes + more.bytes
            total.exposed = total.exposed + more.exposed
            total.in_flight = total.in_flight + more.in_flight


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


@dataclass(frozen=True)
class Span:
    """An interval of one phase in a trace, in seconds from the trace's start."""

    phase: str
    detail: Any
    start: float
    end: float
    waited: float = 0.0
    """Seconds of a transfer in which the rank only waited for it."""


class Waited:
    """The handle of a collective; charges the duration of ``wait`` to it."""

    def __init__(self, meter: Meter, work: Any, transfer: _Transfer) -> None:
        self._meter = meter
        self._work = work
        self._transfer = transfer

    @property
    def work(self) -> Any:
        """The handle itself, for waits in streams other than the computation's: times are recorded in one stream."""
        return self._work

    def wait(self, instead: Callable[[], object] | None = None) -> None:
        """Wait for the collective, by calling ``instead`` if it is given."""
        # Charged to the collective only here: while it overlaps with computation this rank does not lose time to it.
        before = self._meter.charged
        self._meter.switch(self._transfer.name, before[1])
        began = self._meter.last_mark
        (instead or self._work.wait)()
        self._meter.switch(*before)
        self._transfer.ended = self._meter.last_mark
        self._transfer.waits.append((began, self._transfer.ended))


class Meter:
    """Charges time to phases between ``start`` and ``stop``; otherwise its cost is one check of a flag."""

    def __init__(self) -> None:
        self.on = False
        self.charged: tuple[str, Any] = (OTHER, None)
        """The phase to which time is charged now, and its detail."""
        # One list of times for all phases, so that intervals have neither gaps nor overlaps, and on a GPU each change
        # of phase costs one event and no synchronization.
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
        self.spans: list[Span] = []
        self.flights: list[Span] = []
        """The collectives of ``spans``, each from its call to the end of its wait."""

    def start(self, groups: ParallelGroups, device: torch.device) -> None:
        """Start charging; collectives are named after the axes of ``groups``."""
        self._names = _names_of(groups)
        self._device = device
        self.on = True
        self.charged = (OTHER, None)
        self._transfers.clear()
        self._marks = [(OTHER, self._now(), None)]

    def stop(self) -> None:
        """Stop charging."""
        self.on = False

    @property
    def last_mark(self) -> int:
        """Index of the latest recorded time."""
        return len(self._marks) - 1

    def switch(self, phase: str, detail: Any = None) -> str:
        """Charge time to ``phase`` from now on; returns the previous phase. ``detail`` is shown in a trace."""
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

    @contextmanager
    def phase(self, name: str, *, inclusive: bool = False) -> Iterator[None]:
        """Charge the enclosed code to ``name``; with ``inclusive``, including its collectives and inner phases."""
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
        """Name the contents of the transfers that the enclosed code starts, such as ``compressed gradients``."""
        before = self._label
        self._label = label
        try:
            yield
        finally:
            self._label = before

    @contextmanager
    def capturing(self) -> Iterator[list[tuple[str, float]]]:
        """Collect names and bytes of the collectives of a CUDA graph, for ``sent`` at each replay.

        Nothing is charged meanwhile: events on the stream would be part of the graph.
        """
        was_on = self.on
        self.on = False
        self._captured = []
        try:
            yield self._captured
        finally:
            self.on = was_on
            self._captured = None

    def run(self, operation: str, group: Any, sent: float, call: Callable[[], Any]) -> Any:
        """Call a collective that sends ``sent`` bytes from this rank; returns its handle, or None if it is complete.

        A transfer of this rank alone has a name such as ``host`` or ``disk`` as ``group``.
        """
        name = f"{group if isinstance(group, str) else self._names.get(group, OTHER)} {operation}"
        if self._captured is not None:
            self._captured.append((name, sent))
        if not self.on:
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
        return Waited(self, work, transfer)

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
        """Return the times since ``start`` or the last ``take``; on a GPU this synchronizes."""
        # The end of this interval is the beginning of the next, so that no time is lost between two steps.
        self._marks.append((self.charged[0], self._now(), None))
        moments = self._seconds()
        times = StepTimes(seconds=moments[-1])
        for transfer in self._transfers:
            # A transfer may be in flight over several intervals, such as weights that are gathered for the next step.
            transfer.flown += moments[-1 if transfer.ended is None else transfer.ended] - moments[transfer.began]
            if transfer.ended is not None:
                traffic = times.traffic.setdefault(transfer.name, Traffic())
                traffic.calls = traffic.calls + 1
                traffic.bytes = traffic.bytes + transfer.bytes
                traffic.in_flight += transfer.flown
        for (phase, _, _), start, end in zip(self._marks, moments, moments[1:], strict=False):
            if phase in self._kinds:
                times.traffic.setdefault(phase, Traffic()).exposed += end - start
            else:
                times.phases[phase] = times.phases.get(phase, 0.0) + end - start
        if self.keep_spans:
            bounds = zip(self._marks, moments, moments[1:], strict=False)
            self.spans = [Span(phase, detail, start, end) for (phase, _, detail), start, end in bounds]
            self.flights = self._flights(moments)
        self._marks = [self._marks[-1]]
        # A transfer still in flight is counted after its wait.
        self._transfers = [transfer for transfer in self._transfers if transfer.ended is None]
        for transfer in self._transfers:
            transfer.began = 0
            transfer.waits.clear()
        return times

    def flights_since(self, mark: int) -> list[Span]:
        """Return the transfers that ended after the recorded time ``mark``, in seconds after it.

        On a GPU this synchronizes.
        """
        self.mark()
        moments = self._seconds()
        later_flights = (flight for flight in self._flights(moments) if flight.end > moments[mark])
        began = moments[mark]
        return [replace(flight, start=flight.start - began, end=flight.end - began) for flight in later_flights]

    def _flights(self, moments: list[float]) -> list[Span]:
        """The transfers that have ended."""
        return [
            Span(
                transfer.name if transfer.label is None else f"{transfer.name}: {transfer.label}",
                transfer.detail,
                moments[transfer.began],
                moments[transfer.ended],
                sum(moments[end] - moments[start] for start, end in transfer.waits),
            )
            for transfer in self._transfers
            if transfer.ended
        ]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        # The host runs ahead of the GPU, so its clock would measure launches; events are read only when the times are
        # needed.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self) -> list[float]:
        """The recorded times in seconds from the first one."""
        first = self._marks[0][1]
        if self._device.type != "cuda":
            return [mark - first for _, mark, _ in self._marks]
        # Events of one stream are complete in order, so waiting for the last is enough.
        self._marks[-1][1].synchronize()
        return [first.elapsed_time(mark) / 1000.0 for _, mark, _ in self._marks]


def _names_of(groups: ParallelGroups) -> dict[Any, str]:
    """Names of this rank's groups; of several combinations with the same ranks, the shortest name."""
    names: dict[Any, str] = {}
    for axes in sorted(COMBINATIONS, key=lambda axes: axes.count("-")):
        if groups.group(axes).size() > 1:
            names.setdefault(groups.group(axes), axes)
    special = {"embedding": groups.embedding, "cp heads": groups.context.heads, "cp ring": groups.context.ring}
    special |= {"outer": groups.outer, "outer reports": groups.outer_reports}
    for name, group in special.items():
        if group is not None and group.size() > 1:
            names.setdefault(group, name)
    return names


METER: Meter = cast(Meter, Forwarding(RankLocal(Meter)))
"""The meter of this rank, which collectives and the pipeline executor report to."""
