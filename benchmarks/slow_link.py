"""A simulated link: collectives arrive no earlier than over a link of a given bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

from megatron_core.parallel.meter import METER


class SlowLink:
    """Delays the collectives that the meter charges, which must be on, by their bytes / ``bandwidth`` + ``latency``.

    ``patterns`` are those of the delayed kinds, such as ``all_to_all``. Like a real link it transfers one after the
    other, from their calls on and without this rank's help: ``wait`` sleeps only for the time that is left, so that
    computation before it hides a delay. Between ranks on one machine the link exists once for each rank.
    """

    def __init__(self, patterns: Sequence[str], bandwidth: float, latency: float = 0.0) -> None:
        """``bandwidth`` in bytes per second, ``latency`` in seconds."""
        self.patterns, self.bandwidth, self.latency = tuple(patterns), bandwidth, latency
        self.delayed = 0.0
        """Sum of all delays so far, in seconds."""
        self._free = 0.0

    @contextmanager
    def installed(self) -> Iterator[SlowLink]:
        """Delay the collectives of this process inside the context."""
        run = METER.run

        def slow(kind: str, group: Any, sent: float, call: Callable[[], Any]) -> Any:
            if not any(fnmatch(kind, pattern) for pattern in self.patterns):
                return run(kind, group, sent, call)
            due = self._arrival(sent)

            def delayed() -> Any:
                work = call()
                if work is not None:
                    return _Arriving(work, due)
                _sleep_until(due)
                return None

            return run(kind, group, sent, delayed)

        METER.run = slow  # type: ignore[method-assign]
        try:
            yield self
        finally:
            METER.run = run  # type: ignore[method-assign]

    def _arrival(self, sent: float) -> float:
        delay = self.latency + sent / self.bandwidth
        self.delayed += delay
        self._free = max(self._free, time.perf_counter()) + delay
        return self._free


class _Arriving:
    """The handle of a delayed collective."""

    def __init__(self, work: Any, due: float) -> None:
        self._work, self._due = work, due

    def wait(self) -> None:
        """Wait for the collective and for the simulated link."""
        self._work.wait()
        _sleep_until(self._due)


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
