"""A batch size or sequence length as a function of the number of samples consumed."""

from dataclasses import dataclass
from typing import Protocol


class Growth(Protocol):
    """A value that changes with the number of samples consumed."""

    @property
    def is_sound(self) -> bool:
        """Whether all its values are 1 or more; a rule of the setting reports the fault."""

    @property
    def samples(self) -> int:
        """Number of samples after which the value is constant."""

    def change_after(self, consumed_samples: int) -> int:
        """Number of samples at which the value after ``consumed_samples``, less than ``samples``, changes."""

    def at(self, consumed_samples: int) -> int:
        """The value after ``consumed_samples`` samples."""


@dataclass(frozen=True)
class Steps:
    """A value that changes at given numbers of samples."""

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


def constant(value: int) -> Steps:
    """One value for all samples."""
    return Steps(((0, value),))
