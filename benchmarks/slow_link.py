"""A simulated link: collectives arrive no earlier than over a link of a given bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

from megatron_core.parallel.meter import METER


class SlowLink:
    """Delays the collectives that the meter charges, which must be on, by their bytes / ``bandwidth``.

    ``patterns`` are those of the delayed kinds, such as ``all_to_all``. Like a real link it transfers one after the
    other, from this rank's calls on and without its help: ``wait`` sleeps for the time that is left when it is called,
    so that computation before it hides a delay, and waiting for a rank that is late does not.
    """

    def __init__(self, patterns: Sequence[str], bandwidth: float) -> None:
        """``bandwidth`` in bytes per second."""
        self._patterns, self._bandwidth = tuple(patterns), bandwidth
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
        self._free = max(self._free, time.monotonic()) + delay
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
        left = min(max(self._due - time.monotonic(), 0.0), self._delay)
        if self.work is not None:
            self.work.wait()
        self._link.exposed += left
        time.sleep(left)
