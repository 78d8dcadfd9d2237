"""Settings of batches that grow, and the growth that they describe."""

import re
from dataclasses import dataclass

from megatron_core.config.growth import Growth, Steps
from megatron_core.config.setting import ALWAYS, Resume, section, setting
from megatron_core.config.training import TrainingConfig

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


@dataclass(frozen=True, kw_only=True)
@section(when=ALWAYS, resume=Resume.REPORTED)
class BatchGrowthConfig(TrainingConfig):
    """Batches that grow during a training."""

    rampup_batch_size: tuple[int, int, int] | None = setting(None)
    """START INCREMENT SAMPLES: the global batch has START sequences at first. During the first SAMPLES samples it grows
    in equal steps of INCREMENT to --global-batch-size."""
    step_batch_size_schedule: tuple[str, ...] | None = setting(None)
    """TOKENS:SIZE ...: the global batch has SIZE sequences after TOKENS tokens of training, for example 0:384 200B:768
    400B:1152; the last size is --global-batch-size."""

    def final_batch_size(self, data_parallel_size: int) -> int:
        """Number of sequences per optimizer step, after defaults and at the end of the growth."""
        # The last size does not depend on the length of a sample.
        steps = parse_steps(self.step_batch_size_schedule or (), 1)
        if self.global_batch_size is None and steps:
            return steps[-1][1]
        return super().final_batch_size(data_parallel_size)

    def batch_growth(self, data_parallel_size: int, seq_length: int) -> Growth:
        """Number of sequences per optimizer step as a function of consumed samples of ``seq_length`` tokens."""
        if self.step_batch_size_schedule is not None:
            return Steps(parse_steps(self.step_batch_size_schedule, seq_length))
        if self.rampup_batch_size is not None:
            return Ramp(*self.rampup_batch_size, self.final_batch_size(data_parallel_size))
        return super().batch_growth(data_parallel_size, seq_length)


def parse_steps(entries: tuple[str, ...], seq_length: int) -> tuple[tuple[int, int], ...]:
    """Parse ``TOKENS:VALUE ...``, numbers with K, M, B or T for 10^3 to 10^12, into sorted pairs (samples, value).

    The result is empty for text in another form. Source: Megatron-LM's ``--step-batch-size-schedule``.
    """
    matches = [re.fullmatch(rf"{_NUMBER}:{_NUMBER}", entry) for entry in " ".join(entries).replace(",", " ").split()]
    if not all(matches) or seq_length < 1:
        return ()
    pairs = [(_number(*match.group(1, 2)), _number(*match.group(3, 4))) for match in matches if match]
    return tuple(sorted((tokens // seq_length, value) for tokens, value in pairs))


_NUMBER = r"(\d+(?:\.\d+)?)([KMBTkmbt]?)"


def _number(digits: str, unit: str) -> int:
    return int(float(digits) * 1000 ** ("KMBT".index(unit.upper()) + 1 if unit else 0))
