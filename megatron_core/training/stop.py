"""Signs of life for the watchdog, and an early stop by a signal or a time limit, with a checkpoint."""

import signal
import time
from types import FrameType
from typing import Any

from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run

# torchrun forwards a Ctrl-C that the terminal also sends to the processes: two within this time count as one.
SAME_SIGNAL_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Heartbeat(Callback):
    """Tells the watchdog which step starts; the watchdog reports a rank that makes no progress."""

    priority = 800

    def before_step(self) -> None:
        """Report the start of the next step."""
        if self.run.world.watchdog is not None:
            self.run.world.watchdog.beat(self.run.state.iteration + 1)

    def close(self) -> None:
        """Stop the timer: no more steps follow."""
        if self.run.world.watchdog is not None:
            self.run.world.watchdog.rest()


class StopRequests(Callback):
    """Requests a stop with a checkpoint after SIGTERM, SIGHUP, SIGUSR1, Ctrl-C, or ``exit_duration_in_mins``.

    ``train_step`` combines the requests of all ranks, which therefore stop after the same step. Another Ctrl-C, later
    than ``SAME_SIGNAL_SECONDS``, interrupts immediately. Ignored signals, such as SIGHUP under nohup, stay ignored.
    """

    priority = 700

    def __init__(self, run: Run) -> None:
        self.run = run
        self._deadline: float | None = None
        self._signalled_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def before_run(self) -> None:
        """Start the time limit and install the signal handlers."""
        minutes = self.run.config.training.exit_duration_in_mins
        self._deadline = None if minutes is None else time.monotonic() + 60.0 * minutes
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in handled}

    def before_step(self) -> None:
        """Request a stop after this step if the time limit is over."""
        if self._deadline is not None and time.monotonic() > self._deadline and not self.run.stop_reason:
            self.run.stop_reason = "time limit"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at, self.run.stop_reason = now, signal.Signals(number).name
        elif number == signal.SIGINT and now - self._signalled_at > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
