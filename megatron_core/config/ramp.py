"""A batch size or sequence length that grows in equal steps with the number of samples consumed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """Grows from ``start`` to ``end`` by ``increment`` over ``samples`` samples, with each value for equally many.

    With k = (end - start) / increment, the value after c samples is start + floor(c k / samples) increment, and
    ``end`` from c = samples on. Source: Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES``.
    """

    start: int
    """First value."""
    increment: int
    """Difference between one value and the next."""
    samples: int
    """Samples over which it grows."""
    end: int
    """Last value."""

    @classmethod
    def of(cls, given: tuple[int, int, int] | None, end: int) -> Ramp:
        """The ramp of a setting; constant for ``None``."""
        return cls(*given, end) if given else cls(end, 1, 0, end)

    def at(self, consumed_samples: int) -> int:
        """The value after ``consumed_samples`` samples."""
        if consumed_samples >= self.samples:
            return self.end
        increments = (self.end - self.start) // self.increment
        # In integers, because a quotient of floats can be off by one increment at the ends of the steps.
        return self.start + consumed_samples * increments // self.samples * self.increment

    def __str__(self) -> str:
        """The values as given on the command line."""
        return f"{self.start} {self.increment} {self.samples}"
