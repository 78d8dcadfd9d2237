"""Blends that follow one another: a data mix that changes in the course of a training."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from megatron_core.datasets.base import Dataset, Sample


class Blend(Protocol):
    """A blend of which one can ask where a sample comes from."""

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the data set that a sample is read from, and the index in it."""
        ...

    def taken(self, samples: int) -> tuple[int, ...]:
        """How many of the first samples come from each data set."""
        ...


@dataclass(frozen=True)
class MixPhase:
    """A blend of `parts`, for `samples` samples or, if None, for all that follow; parts have names."""

    blend: Blend
    parts: dict[str, Dataset]
    samples: int | None


class PhasedDataset:
    """Phase after phase in an endless order: sample i is a pure function of i, as in a single blend.

    A part that several phases name goes on in each of them after the samples that the phases before took from it, so
    that no text is seen again before all of it was seen.
    """

    def __init__(self, phases: Sequence[MixPhase]) -> None:
        self.sequence_length = next(iter(phases[0].parts.values())).sequence_length
        self._phases = tuple(phases)
        self._first = [0, *accumulate(phase.samples or 0 for phase in phases[:-1])]
        self._offsets: list[dict[str, int]] = []
        taken: Counter[str] = Counter()
        for phase in phases:
            self._offsets.append({name: taken[name] for name in phase.parts})
            taken.update(dict(zip(phase.parts, phase.blend.taken(phase.samples or 0), strict=True)))

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        name, item, phase = self.locate(index)
        return phase.parts[name][item]

    def locate(self, index: int) -> tuple[str, int, MixPhase]:
        """The part that sample `index` is read from, the index in it, and the phase."""
        if index < 0:
            raise IndexError(f"sample {index}: the order starts at 0")
        number = bisect_right(self._first, index) - 1
        phase = self._phases[number]
        part, item = phase.blend.locate(index - self._first[number])
        name = list(phase.parts)[part]
        return name, self._offsets[number][name] + item, phase
