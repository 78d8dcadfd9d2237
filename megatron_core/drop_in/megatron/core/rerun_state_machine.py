"""Checks of results, without repeating a step to find the cause of an error."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_core.errors import ConfigError, DataError


class RerunMode(str, Enum):
    """The values of ``--rerun-mode``."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_determinism_stats"


class RerunDataIterator:
    """The items of an iterator. A step runs once, so that no item is read again: ``rewind`` raises ConfigError."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.iterable)

    def advance(self) -> None:
        """Continue: no items are stored."""

    def rewind(self) -> None:
        """Raise ConfigError."""
        raise ConfigError("a program's step is not repeated; pretrain_gpt.py repeats steps with --rerun-mode")


class RerunStateMachine:
    """Megatron's calls around a step, and ``validate_result``."""

    def __init__(self) -> None:
        self._has_run, self._largest = False, dict[str, list[float]]()

    def get_mode(self) -> RerunMode:
        """Return DISABLED: a step runs once."""
        return RerunMode.DISABLED

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Return True and False in turn: each step runs once."""
        self._has_run = not self._has_run
        return self._has_run

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return (False, False, 0)."""
        return False, False, 0

    def validate_result(
        self, result: Any, rejection_func: Callable[[Any], Any], message: str = "unexpected result", **settings: Any
    ) -> None:
        """Raise DataError if ``rejection_func(result)``, or warn with ``fatal=False``."""
        if not bool(rejection_func(result)):
            return
        if settings.get("fatal", True):
            raise DataError(f"{message}: {result}; --no-check-for-nan-in-loss-and-grad disables such checks")
        warnings.warn(f"{message}: {result}", stacklevel=2)

    def is_unexpectedly_large(self, result: Any, threshold: float, context: str, num_samples: int = 100) -> bool:
        """Whether ``result`` is ``threshold`` times the largest of the first ``num_samples`` of this ``context``."""
        seen, value = self._largest.setdefault(context, []), float(result)
        if len(seen) < num_samples:
            seen.append(value)
            return False
        return value >= max(seen) * threshold


_MACHINES = [RerunStateMachine()]


def get_rerun_state_machine() -> RerunStateMachine:
    """Return the instance of this process."""
    return _MACHINES[0]


def destroy_rerun_state_machine() -> None:
    """Replace the instance of this process by a new one."""
    _MACHINES[0] = RerunStateMachine()


class RerunDiagnostic(str, Enum):
    """Kinds of errors that Megatron injects."""

    CORRECT_RESULT = "correct_result"
    TRANSIENT_ERROR = "transient_error"
    PERSISTENT_ERROR = "persistent_error"


@dataclass
class RerunErrorInjector:
    """Errors in results, of which none are injected; raises ConfigError for ``error_injection_rate`` above 0."""

    error_injection_rate: int = 0
    error_injection_type: RerunDiagnostic = RerunDiagnostic.TRANSIENT_ERROR

    def __post_init__(self) -> None:
        if self.error_injection_rate:
            raise ConfigError(f"error_injection_rate={self.error_injection_rate} is not supported; use --inject-fault")


def initialize_rerun_state_machine(**settings: Any) -> None:
    """Replace the instance of this process; ``settings`` have no effect, because a step is not repeated."""
    destroy_rerun_state_machine()
