"""The computation of one step, which may be repeated before its result counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_core.training.driver import StepOutcome


@dataclass(frozen=True)
class Attempt:
    """A computation of a step; equal on all ranks."""

    outcome: StepOutcome
    losses: tuple[float, ...]
    """Sum of the losses of each copy's samples; empty unless ``Attempts.by_copy``."""
    statistics: Callable[[], dict[str, float]]
    """Returns further metrics of the step."""


class Compute(Protocol):
    """Computes the current step."""

    def __call__(self, number: int = 0, *, shift: int = 0, discard: bool = False) -> Attempt:
        """``number``: of the attempt; ``shift``: each copy computes the samples of the copy ``shift`` places after it;
        ``discard``: do not update the weights."""


class Attempts:
    """A run's way of taking steps: each is computed once. A callback that repeats steps derives from it."""

    by_copy = False
    """Whether ``Attempt.losses`` is computed."""

    def take(self, compute: Compute) -> Attempt:
        """Compute the current step; the last attempt is the result of the step."""
        return compute()

    def is_spoiled(self, number: int, shift: int) -> bool:
        """Whether this rank's loss is NaN in an attempt, as a test of repetitions; see ``Compute``."""
        return False
