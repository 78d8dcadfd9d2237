"""Timers by name."""

import time
from collections.abc import Sequence

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import log_dist


class Timer:
    """Sums the time between ``start`` and ``stop``; the device is synchronized at both."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_, self.count = name, False, 0
        self._began = self._seconds = 0.0

    def start(self) -> None:
        """Begin an interval."""
        get_accelerator().synchronize()
        self.started_, self._began = True, time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End the interval; ``reset``: forget earlier ones."""
        get_accelerator().synchronize()
        seconds = time.perf_counter() - self._began
        self._seconds = seconds if reset else self._seconds + seconds
        self.started_, self.count = False, self.count + 1

    def reset(self) -> None:
        """Forget all intervals."""
        self.started_, self._seconds, self.count = False, 0.0, 0

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far."""
        found = 1000.0 * (self._seconds + (time.perf_counter() - self._began) * self.started_)
        if reset:
            self.reset()
        return found

    def mean(self) -> float:
        """Return the milliseconds of an interval."""
        return 1000.0 * self._seconds / max(self.count, 1)


class SynchronizedWallClockTimer:
    """Timers by name: ``timers("forward").start()``."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """Return all timers."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Whether a timer exists."""
        return name in self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of timers, divided by ``normalizer``."""
        known = [name for name in names if name in self.timers]
        times = [f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known]
        log_dist(f"time (ms) | {' | '.join(times)}", ranks=ranks or [0])


class ThroughputTimer:
    """Samples per second of ``batch_size`` samples a step, after ``start_step`` steps.

    ``synchronizes``: wait for the GPU before each reading of the clock.
    """

    def __init__(
        self,
        config: object = None,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: object = None,
        *,
        synchronizes: bool = True,
    ) -> None:
        self.batch_size, self.start_step, self.steps_per_output = max(batch_size, 1), start_step, steps_per_output
        self.synchronizes, self.epoch_count = synchronizes, 0
        self.global_step_count, self.total_elapsed_time, self._began = 0, 0.0, 0.0

    def _synchronize(self) -> None:
        if self.synchronizes:
            get_accelerator().synchronize()

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """Begin a micro-batch."""
        self._synchronize()
        self._began = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch; ``global_step``: it is the last of its step."""
        self._synchronize()
        self.global_step_count += global_step
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._began
        every = self.steps_per_output
        if global_step and report_speed and every and self.global_step_count % every == 0:
            log_dist(f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} samples per second", ranks=[0])

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second; minus infinity before ``start_step``."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")
