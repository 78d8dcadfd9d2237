"""A simulated link: collectives arrive no earlier than over a link of a given bandwidth.

On the system's clock this shows what a slow network costs a real step. On a ``SimulatedClock`` only the link and the
computation that a test simulates take time, so that the hidden part depends on the order of the calls alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any, Protocol

from megatron_core.reports.meter import METER


class Clock(Protocol):
    """The two functions of the module ``time`` that a link uses; times are in seconds."""

    def monotonic(self) -> float:
        """The time now."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...


class SimulatedClock:
    """A clock on which time passes only in ``sleep``, which returns at once."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """The sum of all sleeps so far."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Add to the time."""
        self._now += seconds


class SlowLink:
    """Delays the collectives that the meter charges, which must be on, by their bytes / ``bandwidth``.

    ``patterns`` are those of the delayed kinds, such as ``all_to_all``. Like a real link it transfers one after the
    other, from this rank's calls on and without its help: ``wait`` sleeps for the time that is left when it is called,
    so that computation before it hides a delay, and waiting for a rank that is late does not.
    """

    def __init__(self, patterns: Sequence[str], bandwidth: float, clock: Clock = time) -> None:
        """``bandwidth`` in bytes per second."""
        self._patterns, self._bandwidth, self.clock = tuple(patterns), bandwidth, clock
        self.delayed = 0.0
        """Sum of all delays so far, in seconds."""
        self.exposed = 0.0
        """The part of ``delayed`` in which this rank slept, in seconds."""
        self._free = 0.0

    @contextmanager
    def installed(self) -> Iterator[SlowLink]:
        """Delay the collectives of this process inside the context."""
        run = METER.run

        def slow(kind: str, group: Any, sent: float, call: Callable[[], Any]) -> Any:
            if not any(fnmatch(kind, pattern) for pattern in self._patterns):
                return run(kind, group, sent, call)
            return run(kind, group, sent, lambda: self._start(call, sent / self._bandwidth))

        METER.run = slow  # type: ignore[method-assign]
        try:
            yield self
        finally:
            METER.run = run  # type: ignore[method-assign]

    def _start(self, call: Callable[[], Any], delay: float) -> Any:
        self._free = max(self._free, self.clock.monotonic()) + delay
        self.delayed += delay
        arriving = _Arriving(self, self._free, delay)
        work = call()
        if work is None:
            arriving.wait()
            return None
        arriving.work = work
        return arriving


class _Arriving:
    """The handle of a collective that arrives at ``due``, and no more than ``delay`` after its call."""

    def __init__(self, link: SlowLink, due: float, delay: float) -> None:
        self._link, self._due, self._delay = link, due, delay
        self.work: Any = None

    def wait(self) -> None:
        """Wait for the collective and for the simulated link."""
        left = min(max(self._due - self._link.clock.monotonic(), 0.0), self._delay)
        if self.work is not None:
            self.work.wait()
        self._link.exposed += left
        self._link.clock.sleep(left)
