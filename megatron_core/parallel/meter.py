"""Where the time of this rank goes: phases that add up to the whole, and what its collectives send.

At every moment exactly one phase is charged, so that the phases of a step sum to its time. A collective is a phase of
its own as long as this rank waits for it; what travels while the rank computes is charged to the computation, and is
seen as the collective's time in flight. On a GPU moments are events of the stream that computes, so that times are
those of the device, and are read once they have passed.

Bytes are those that a rank sends if the ranks form a ring: of n ranks 2 (n-1)/n x for an all-reduce of x bytes,
(n-1)/n x for gathering or reduce-scattering x bytes in all, and for an all-to-all of x bytes. Divided by time they
compare with the rate of a link. Source: NVIDIA's nccl-tests, "bus bandwidth".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_core.parallel.groups import COMBINATIONS, ParallelGroups

PROCESS_BEGAN = time.time()
"""Unix time when this process loaded the library: what lies before its first step is lost to training."""
OTHER = "other"


@dataclass
class Traffic:
    """The collectives of one kind over one group."""

    calls: int = 0
    bytes: float = 0.0
    exposed: float = 0.0
    """Seconds in which this rank did nothing but wait for them."""
    in_flight: float = 0.0
    """Seconds from the call of each to the end of the wait for it."""


@dataclass
class StepTimes:
    """What one rank did in a stretch of time; seconds."""

    phases: dict[str, float] = field(default_factory=dict)
    """By phase, collectives left out; with what is ``exposed`` of those they sum to ``seconds``."""
    traffic: dict[str, Traffic] = field(default_factory=dict)
    """By group and kind, as ``tp all_reduce``."""
    seconds: float = 0.0

    def add(self, other: StepTimes) -> None:
        """Add what was done in another stretch."""
        self.seconds += other.seconds
        for name, seconds in other.phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        for name, more in other.traffic.items():
            own = self.traffic.setdefault(name, Traffic())
            own.calls, own.bytes = own.calls + more.calls, own.bytes + more.bytes
            own.exposed, own.in_flight = own.exposed + more.exposed, own.in_flight + more.in_flight


@dataclass
class _Transfer:
    name: str
    bytes: float
    began: int
    ended: int | None = None
    flown: float = 0.0
    """Seconds before the stretch that is charged now."""


@dataclass(frozen=True)
class Span:
    """A stretch of one phase, for a trace: seconds since the trace's start."""

    phase: str
    detail: Any
    start: float
    end: float


class Waited:
    """The handle of a collective; the time that ``wait`` takes is charged to it."""

    def __init__(self, meter: Meter, work: Any, transfer: _Transfer) -> None:
        self._meter, self._work, self._transfer = meter, work, transfer

    def wait(self) -> None:
        """Wait for the collective."""
        before = self._meter.switch(self._transfer.name)
        self._work.wait()
        self._meter.switch(before)
        self._transfer.ended = self._meter.last_mark


class Meter:
    """Charges time to phases between ``start`` and ``stop``; otherwise it costs one look at a flag."""

    def __init__(self) -> None:
        self.on = False
        self._phase = OTHER
        self._marks: list[tuple[str, Any, Any]] = []
        self._transfers: list[_Transfer] = []
        self._kinds: set[str] = set()
        """Phases that are collectives."""
        self._names: Mapping[Any, str] = {}
        self._device = torch.device("cpu")
        self.keep_spans = False
        """Whether ``take`` leaves the stretches of the step in ``spans``."""
        self.spans: list[Span] = []

    def start(self, groups: ParallelGroups, device: torch.device) -> None:
        """Begin to charge; collectives are named by the axes of ``groups``."""
        self._names = _names_of(groups)
        self._device, self.on, self._phase = device, True, OTHER
        self._transfers.clear()
        self._marks = [(OTHER, self._now(), None)]

    def stop(self) -> None:
        """Charge no more."""
        self.on = False

    @property
    def last_mark(self) -> int:
        """Number of the last moment that was taken."""
        return len(self._marks) - 1

    def switch(self, phase: str, detail: Any = None) -> str:
        """Charge to ``phase`` from now on; returns the one before. ``detail`` is what a trace shows."""
        if not self.on:
            return phase
        before, self._phase = self._phase, phase
        self._marks.append((phase, self._now(), detail))
        return before

    @contextmanager
    def phase(self, name: str, *, whole: bool = False) -> Iterator[None]:
        """Charge what runs inside to ``name``; with ``whole`` its collectives and inner phases, too."""
        before, was_on = self.switch(name), self.on
        self.on = was_on and not whole
        try:
            yield
        finally:
            self.on = was_on
            self.switch(before)

    def run(self, kind: str, group: Any, sent: float, call: Callable[[], Any]) -> Any:
        """Call a collective in which this rank sends ``sent`` bytes; its handle, or None if it is complete."""
        if not self.on:
            return call()
        transfer = _Transfer(f"{self._names.get(group, OTHER)} {kind}", sent, len(self._marks))
        self._transfers.append(transfer)
        self._kinds.add(transfer.name)
        before = self.switch(transfer.name)
        try:
            work = call()
        finally:
            self.switch(before)
        if work is None:
            transfer.ended = self.last_mark
            return None
        return Waited(self, work, transfer)

    def sent(self, kind: str, size: float) -> None:
        """Count a message for which this rank does not wait here."""
        if self.on:
            self._transfers.append(_Transfer(kind, size, 0, 0))

    def take(self) -> StepTimes:
        """What has been charged since ``start`` or the last ``take``; on a GPU it waits for the work so far."""
        self._marks.append((self._phase, self._now(), None))
        moments = self._seconds()
        found = StepTimes(seconds=moments[-1])
        for transfer in self._transfers:
            transfer.flown += moments[-1 if transfer.ended is None else transfer.ended] - moments[transfer.began]
            if transfer.ended is not None:
                traffic = found.traffic.setdefault(transfer.name, Traffic())
                traffic.calls, traffic.bytes = traffic.calls + 1, traffic.bytes + transfer.bytes
                traffic.in_flight += transfer.flown
        for (phase, _, _), start, end in zip(self._marks, moments, moments[1:], strict=False):
            if phase in self._kinds:
                found.traffic.setdefault(phase, Traffic()).exposed += end - start
            else:
                found.phases[phase] = found.phases.get(phase, 0.0) + end - start
        if self.keep_spans:
            bounds = zip(self._marks, moments, moments[1:], strict=False)
            self.spans = [Span(phase, detail, start, end) for (phase, _, detail), start, end in bounds]
        self._marks = [self._marks[-1]]
        # What is still under way is counted once it has been waited for.
        self._transfers = [transfer for transfer in self._transfers if transfer.ended is None]
        for transfer in self._transfers:
            transfer.began = 0
        return found

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self) -> list[float]:
        """The moments in seconds after the first one."""
        first = self._marks[0][1]
        if self._device.type != "cuda":
            return [mark - first for _, mark, _ in self._marks]
        self._marks[-1][1].synchronize()
        return [first.elapsed_time(mark) / 1000.0 for _, mark, _ in self._marks]


def _names_of(groups: ParallelGroups) -> dict[Any, str]:
    """Names of this rank's groups: combinations with the same ranks share one, and the shortest name is theirs."""
    names: dict[Any, str] = {}
    for axes in sorted(COMBINATIONS, key=lambda axes: axes.count("-")):
        if groups.group(axes).size() > 1:
            names.setdefault(groups.group(axes), axes)
    own = {"embedding": groups.embedding, "cp heads": groups.context.heads, "cp ring": groups.context.ring}
    for name, group in own.items():
        if group is not None and group.size() > 1:
            names.setdefault(group, name)
    return names


METER = Meter()
"""The meter of this process, which collectives and the pipeline's executor tell what they do."""
