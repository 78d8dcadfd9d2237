"""Named timers."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.errors import ConfigError
from megatron_core.reports.timers import timer_lines


class Timer:
    """Measures the time between ``start`` and ``stop``, in seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._elapsed = self._active = 0.0
        self._started: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start the timer; with ``barrier`` after all ranks have arrived."""
        if self._started is not None:
            raise ConfigError(f"timer {self.name!r} has already been started; stop it first")
        _wait(barrier)
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop the timer and add the time to the sum."""
        if self._started is None:
            raise ConfigError(f"timer {self.name!r} is not started; start it first")
        _wait(barrier)
        passed = time.perf_counter() - self._started
        self._elapsed, self._active, self._started = self._elapsed + passed, self._active + passed, None

    def reset(self) -> None:
        """Set the sum to 0, except for ``active_time``."""
        self._elapsed, self._started = 0.0, None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the sum since the last reset; a running timer continues."""
        running = self._started is not None
        if running:
            self.stop(barrier)
        total = self._elapsed
        if reset:
            self.reset()
        if running:
            self.start(barrier)
        return total

    def active_time(self) -> float:
        """Return the sum of all times."""
        return self._active


class _NoTimer(Timer):
    """A timer above the log level."""

    def start(self, barrier: bool = False) -> None:
        """Do nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing."""


class Timers:
    """Timers by name with levels from 0; timers above ``log_level`` measure nothing."""

    def __init__(self, log_level: int, log_option: str) -> None:
        if log_option not in ("max", "minmax", "all") or log_level not in (0, 1, 2):
            raise ConfigError(f"{log_option=} must be max, minmax or all, and {log_level=} must be 0, 1 or 2")
        self._log_level = log_level
        self._log_option: Any = log_option
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer of a name; its first call sets the level."""
        level = self._levels.setdefault(name, 2 if log_level is None else log_level)
        if log_level not in (None, level):
            raise ConfigError(f"timer {name!r} has log_level={level}, not {log_level}")
        if name not in self._timers:
            self._timers[name] = Timer(name) if level <= self._log_level else _NoTimer(name)
        return self._timers[name]

    def get_all_timers_string(
        self, names: Sequence[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str:
        """Return a line for each timer in milliseconds: minimum and maximum over ranks, maximum, or all."""
        _wait(barrier)
        names = names or [name for name, timer in self._timers.items() if not isinstance(timer, _NoTimer)]
        own = torch.tensor([self._timers[name].elapsed(reset) / normalizer for name in names])
        times = [own]
        if dist.is_initialized():
            times = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(times, own)
        ranks = [{"phases": dict(zip(names, each.tolist(), strict=True))} for each in times]
        return "\n".join(timer_lines(ranks, level=1, option=self._log_option))

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print ``get_all_timers_string`` on one rank, by default the last."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        last = dist.get_world_size() - 1 if dist.is_initialized() else 0
        if not dist.is_initialized() or dist.get_rank() == (last if rank is None else rank):
            print(text, flush=True)


def _wait(barrier: bool) -> None:
    if barrier and dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
