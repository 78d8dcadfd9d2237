"""Ending a run early, in good order."""

from __future__ import annotations

import signal
import time
from types import FrameType


class StopRequest:
    """This rank's wish to save and leave: SIGTERM came, or ``minutes`` have passed.

    The wish takes effect at the end of a step, on all ranks together: ``train_step`` asks every rank.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._signalled = False
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    @property
    def wanted(self) -> bool:
        """Whether this rank wants to leave."""
        return self._signalled or (self._deadline is not None and time.monotonic() > self._deadline)

    def restore(self) -> None:
        """Give SIGTERM back to who had it before."""
        signal.signal(signal.SIGTERM, self._previous)
