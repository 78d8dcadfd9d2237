"""A value that grows in equal steps while samples are consumed: a batch size, a sequence length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """From ``start`` to ``end`` by ``increment`` over the first ``samples`` samples, each value for an equal share.

    With k = (end - start) / increment, the value after c samples is start + floor(c k / samples) increment, and
    ``end`` from c = samples on. Source: Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES``.
    """

    start: int
    """First value."""
    increment: int
    """What it grows by."""
    samples: int
    """Samples over which it grows."""
    end: int
    """Last value."""

    @classmethod
    def of(cls, given: tuple[int, int, int] | None, end: int) -> Ramp:
        """The ramp of a setting, or no ramp at all for ``None``."""
        return cls(*given, end) if given else cls(end, 1, 0, end)

    def at(self, consumed_samples: int) -> int:
        """The value after so many samples."""
        if consumed_samples >= self.samples:
            return self.end
        increments = (self.end - self.start) // self.increment
        # In integers: a quotient of floats would be off by one step beside some borders.
        return self.start + consumed_samples * increments // self.samples * self.increment

    def __str__(self) -> str:
        """As it is given on a command line."""
        return f"{self.start} {self.increment} {self.samples}"
