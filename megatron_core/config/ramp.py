"""A batch size or sequence length that grows with the number of samples consumed."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_INCREMENTS = 100_000
"""Maximum number of increments of a ramp."""


@dataclass(frozen=True)
class Ramp:
    """Grows from ``start`` to ``end`` in steps of ``increment`` over ``samples`` samples; all values hold equally long.

    With k = (end - start) / increment, the value after c samples is start + floor(c k / samples) increment, and
    ``end`` from c = samples on. Source: Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES``.
    """

    start: int
    """First value."""
    increment: int
    """Difference between one value and the next."""
    samples: int
    """Number of samples during which it grows."""
    end: int
    """Last value."""

    @classmethod
    def of(cls, values: tuple[int, int, int] | None, end: int) -> Ramp:
        """The ramp of a setting; constant for ``None``."""
        return cls(*values, end) if values else cls(end, 1, 0, end)

    def at(self, consumed_samples: int) -> int:
        """The value after ``consumed_samples`` samples."""
        if consumed_samples >= self.samples:
            return self.end
        increments = (self.end - self.start) // self.increment
        # In integers, because a quotient of floats can be off by one increment at the ends of the steps.
        return self.start + consumed_samples * increments // self.samples * self.increment

    def change_after(self, consumed_samples: int) -> int:
        """Number of samples at which the value after ``consumed_samples``, less than ``samples``, changes."""
        increments = (self.end - self.start) // self.increment or 1
        return -(-(consumed_samples * increments // self.samples + 1) * self.samples // increments)

    @property
    def is_sound(self) -> bool:
        """Whether it rises from 1 or more exactly to ``end``, in at most ``MOST_INCREMENTS`` increments."""
        if min(self.start, self.increment, self.end - self.start + 1) < 1:
            return False
        increments, remainder = divmod(self.end - self.start, self.increment)
        return remainder == 0 and increments <= MOST_INCREMENTS and (self.samples > 0 or increments == 0)

    def __str__(self) -> str:
        """The values as given on the command line."""
        return f"{self.start} {self.increment} {self.samples}"


@dataclass(frozen=True)
class Steps:
    """A value that changes at given numbers of samples. Source: Megatron-LM's ``--step-batch-size-schedule``."""

    begins: tuple[tuple[int, int], ...]
    """(samples, value) in ascending order, the first at 0."""

    @property
    def is_sound(self) -> bool:
        """Whether it begins at 0 with values of 1 or more."""
        return bool(self.begins) and self.begins[0][0] == 0 and min(value for _, value in self.begins) > 0

    @property
    def samples(self) -> int:
        """Number of samples after which the value is constant."""
        return self.begins[-1][0]

    def change_after(self, consumed_samples: int) -> int:
        """Number of samples at which the value after ``consumed_samples``, less than ``samples``, changes."""
        return next(samples for samples, _ in self.begins if samples > consumed_samples)

    def at(self, consumed_samples: int) -> int:
        """The value after ``consumed_samples`` samples."""
        return next(value for samples, value in reversed(self.begins) if consumed_samples >= samples)


def parse_steps(entries: tuple[str, ...], seq_length: int) -> tuple[tuple[int, int], ...]:
    """Parse ``TOKENS:VALUE ...``, numbers with K, M, B or T for 10^3 to 10^12, into sorted pairs (samples, value).

    The result is empty for text in another form.
    """
    matches = [re.fullmatch(rf"{_NUMBER}:{_NUMBER}", entry) for entry in " ".join(entries).replace(",", " ").split()]
    if not all(matches) or seq_length < 1:
        return ()
    pairs = [(_number(*match.group(1, 2)), _number(*match.group(3, 4))) for match in matches if match]
    return tuple(sorted((tokens // seq_length, value) for tokens, value in pairs))


_NUMBER = r"(\d+(?:\.\d+)?)([KMBTkmbt]?)"


def _number(digits: str, unit: str) -> int:
    return int(float(digits) * 1000 ** ("KMBT".index(unit.upper()) + 1 if unit else 0))
