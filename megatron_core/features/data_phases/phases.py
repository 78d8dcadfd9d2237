"""Blends one after another: their file, and their data set."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron_core.datasets.base import Dataset, Sample, short_names
from megatron_core.datasets.blend import BlendedDataset, parse_blend
from megatron_core.datasets.build import DatasetBuilder
from megatron_core.datasets.paths import DEFAULT_SPLIT, Phase, parse_split, split_ranges, text_of, words_of
from megatron_core.errors import ConfigError, quoted
from megatron_core.features.data_phases.settings import DataPhasesConfig
from megatron_core.text_file import parse_yaml


def read_phases(data: DataPhasesConfig) -> tuple[Phase, ...]:
    """The phases in order; only the last one has no number of samples."""
    path = str(data.data_phases)
    expected = "expected a list of {samples: N, data_path: [...]}, the last one without samples"
    text = text_of("data_phases", path)
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"data_phases={path} is not YAML ({error}); {expected}") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(f"data_phases={path} contains a {type(content).__name__}; {expected}")
    return tuple(_phase(path, number, phase, number == len(content)) for number, phase in enumerate(content, 1))


def _phase(path: str, number: int, phase: Any, is_last: bool) -> Phase:
    where = f"data_phases={path}: phase {number}"
    if not isinstance(phase, dict) or not set(phase) <= {"samples", "data_path"} or not phase.get("data_path"):
        raise ConfigError(f"{where} is {quoted(phase)}; expected {{samples: N, data_path: [...]}}")
    samples = phase.get("samples")
    if is_last and samples is not None:
        raise ConfigError(
            f"{where}, the last, has samples={samples}; remove it, because the last phase lasts to the end of training"
        )
    if not is_last and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        raise ConfigError(f"{where} has samples={samples}; give an integer >= 1 (only the last phase has none)")
    return Phase(words_of(f"{where}: data_path", phase["data_path"]), samples)


@dataclass(frozen=True)
class MixPhase:
    """A blend of named `datasets` for `samples` samples, or, if None, for all remaining ones."""

    blend: BlendedDataset
    datasets: dict[str, Dataset]
    samples: int | None


class PhasedDataset:
    """Blends one after another in an endless order; sample i is a pure function of i, as in a single blend.

    A part that occurs in several phases continues in each where the previous phase stopped, so that no text is repeated
    before all of it has been read.
    """

    def __init__(self, phases: Sequence[MixPhase]) -> None:
        self.sequence_length = next(iter(phases[0].datasets.values())).sequence_length
        self._phases = tuple(phases)
        self._names = list(dict.fromkeys(name for phase in phases for name in phase.datasets))
        self.sources = short_names(self._names)
        self._first = [0, *accumulate(phase.samples or 0 for phase in phases[:-1])]
        self._offsets: list[dict[str, int]] = []
        taken: Counter[str] = Counter()
        for phase in phases:
            self._offsets.append({name: taken[name] for name in phase.datasets})
            taken.update(dict(zip(phase.datasets, phase.blend.taken(phase.samples or 0), strict=True)))

    def __getitem__(self, index: int) -> Sample:
        """Item `index` >= 0 of the endless order."""
        name, item, phase = self.locate(index)
        return phase.datasets[name][item]

    def source_of(self, index: int) -> int:
        """Number of the part of a sample, among all parts of all phases."""
        return self._names.index(self.locate(index)[0])

    def locate(self, index: int) -> tuple[str, int, MixPhase]:
        """The part of sample `index`, the index within it, and the phase."""
        if index < 0:
            raise IndexError(f"sample {index}: the order starts at 0")
        number = bisect_right(self._first, index) - 1
        phase = self._phases[number]
        number_of_set, item = phase.blend.locate(index - self._first[number])
        name = list(phase.datasets)[number_of_set]
        return name, self._offsets[number][name] + item, phase


def training_data(builder: DatasetBuilder, data: DataPhasesConfig, phases: Sequence[Phase]) -> PhasedDataset:
    """The training data of all phases."""
    fractions = parse_split(data.split or DEFAULT_SPLIT)
    return PhasedDataset([_mix(builder, phase, fractions) for phase in phases])


def _mix(builder: DatasetBuilder, phase: Phase, fractions: Sequence[float]) -> MixPhase:
    """The training part of a phase."""
    weights, prefixes = parse_blend(phase.data_path)
    if len(set(prefixes)) < len(prefixes):
        raise ConfigError(
            f"data_phases: {' '.join(phase.data_path)} contains a file twice; give it once with the sum of its weights"
        )
    shares = [(file, split_ranges(fractions, len(file))[0]) for file in builder.opened(prefixes)]
    datasets = [builder.keyed(share, "train") for share in shares]
    return MixPhase(BlendedDataset(datasets, weights), dict(zip(prefixes, datasets, strict=True)), phase.samples)
