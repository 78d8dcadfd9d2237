"""Ending a run early, with a checkpoint."""

import signal
import time
from types import FrameType

# torchrun forwards a Ctrl-C that the terminal has already sent to its processes: within this time the two are one.
SAME_SIGNAL_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """This rank's wish to save and leave: SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C came, or ``minutes`` have passed.

    The wish takes effect at the end of a step, on all ranks together: ``train_step`` asks every rank. Another Ctrl-C,
    later than ``SAME_SIGNAL_SECONDS``, interrupts at once. A signal that is ignored, as SIGHUP under nohup, stays so.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._signalled_at: float | None = None
        self._signal = ""
        heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in heeded}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at, self._signal = now, signal.Signals(number).name
        elif number == signal.SIGINT and now - self._signalled_at > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    @property
    def reason(self) -> str:
        """The name of the signal, or ``time limit``; empty if this rank does not want to leave."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        return self._signal or ("time limit" if late else "")

    @property
    def wanted(self) -> bool:
        """Whether this rank wants to leave."""
        return bool(self.reason)

    def restore(self) -> None:
        """Give the signals back to who had them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
