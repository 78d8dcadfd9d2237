"""Callbacks of every run: signs of life for the watchdog, an early stop by a signal or a time limit, and reports."""

import math
import signal
import time
from collections.abc import Sequence
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

from megatron_core.config.flops import flops_per_token
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult

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
        # Python allows handlers in the main thread only; Ray Train runs a training in another one.
        signals = SIGNALS if current_thread() is main_thread() else ()
        handled = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in handled}

    def before_step(self) -> None:
        """Request a stop after this step if the time limit is over."""
        if self._deadline is not None and time.monotonic() > self._deadline and not self.run.stop_reason:
            self.run.stop_reason = "time limit"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            # Only recorded: the handler may run within a collective, which all ranks must finish together.
            self._signalled_at, self.run.stop_reason = now, signal.Signals(number).name
        elif number == signal.SIGINT and now - self._signalled_at > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class Reports(Callback):
    """Sends an event for each step and each evaluation to the sinks."""

    priority = 600

    def __init__(self, run: Run, sinks: Sequence[Sink]) -> None:
        self.run = run
        self._sinks = sinks
        self._began = 0.0

    def before_step(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def after_step(self, result: StepResult) -> None:
        """Send the event of the step; folders of reports that were deleted are created again before."""
        run, size = self.run, result.size
        run.saver.restore_folders()
        # The device has finished the step, because its results have been read on the host.
        seconds = time.perf_counter() - self._began
        added_fields = [fields(result) for fields in run.event_fields]
        flops = size.tokens * flops_per_token(run.config.model, size.sequence_length, run.vocab_size)
        event = StepEvent(
            iteration=run.state.iteration,
            total_iterations=run.total_iterations,
            consumed_samples=run.state.consumed_samples,
            consumed_tokens=run.state.consumed_tokens,
            loss=result.loss,
            learning_rate=result.learning_rate,
            global_batch_size=size.batch_size,
            loss_scale=result.loss_scale,
            grad_norm=result.grad_norm,
            elapsed_ms=1000.0 * seconds,
            tokens_per_second=size.tokens / seconds,
            model_flops_per_second=flops / seconds / run.world.size,
            memory_bytes=peak_memory_bytes(),
            auxiliary_losses=result.auxiliary_losses,
            expert_load=result.expert_load,
            breakdown=result.breakdown,
            skipped=result.skipped,
            params_norm=math.sqrt(result.statistics[0]) if run.config.monitor.log_params_norm else None,
            num_zeros_in_grad=round(result.statistics[1]) if run.config.monitor.log_num_zeros_in_grad else None,
            layout=run.layout,
            **{name: value for fields in added_fields for name, value in fields.items()},
        )
        for sink in self._sinks:
            sink.on_step(event)

    def after_evaluation(self, event: ValidationEvent) -> None:
        """Send the event of an evaluation."""
        for sink in self._sinks:
            sink.on_validation(event)
