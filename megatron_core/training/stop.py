"""Early stop of a run by a signal or a time limit, with a checkpoint."""

import signal
import time
from types import FrameType

# torchrun forwards a Ctrl-C that the terminal also sends to the processes: two within this time count as one.
SAME_SIGNAL_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """This rank's request to save and stop, after SIGTERM, SIGHUP, SIGUSR1 or Ctrl-C, or after ``minutes``.

    ``train_step`` combines the requests, so that all ranks stop together at the end of a step. Another Ctrl-C, later
    than ``SAME_SIGNAL_SECONDS``, interrupts immediately. Ignored signals, such as SIGHUP under nohup, stay ignored.
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
        """The name of the signal, or ``time limit``; empty if this rank requests no stop."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        return self._signal or ("time limit" if late else "")

    @property
    def wanted(self) -> bool:
        """Whether this rank requests a stop."""
        return bool(self.reason)

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
