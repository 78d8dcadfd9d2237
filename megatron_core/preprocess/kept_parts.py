"""The output of a run that keeps its parts: a list of them for each key, instead of a copy of their tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_core.data_parts.manifest import PartEntry, PartList, get_parts_path, relative_to_list
from megatron_core.datasets.indexed import get_bin_path, get_idx_path
from megatron_core.preprocess.atomic_write import atomic_write, sync_file
from megatron_core.preprocess.builder import Extent
from megatron_core.preprocess.inputs import InputFile
from megatron_core.preprocess.output import TokenOutput, WorkFolder
from megatron_core.preprocess.parts import PartFolder
from megatron_core.preprocess.plan import InputPart
from megatron_core.preprocess.settings import PreprocessSettings


class CountedTokens:
    """The interface of `TokenWriter` for tokens that are already in their files: it only counts."""

    def __init__(self, bin_path: str, dtype: Any, resume: Extent | None = None) -> None:
        self.extent = Extent()

    def append(self, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Count documents: tokens, the length of each sequence [S], the number of sequences per document [D]."""
        now = self.extent
        self.extent = Extent(now.tokens + len(tokens), now.sequences + len(lengths), now.documents + len(counts))

    def cut(self, extent: Extent) -> None:
        """Return to an earlier extent."""
        self.extent = extent

    def close(self) -> None:
        """Nothing is open."""

    def discard(self) -> None:
        """Nothing was written."""


class KeptParts(TokenOutput):
    """Checks the parts in the order of the input as `TokenOutput` does, and lists those that belong to the result."""

    writer = CountedTokens

    def __init__(
        self, work: WorkFolder, sources: Sequence[InputFile], settings: PreprocessSettings, remarks: Path, dtype: str
    ) -> None:
        work.state = None  # reading the counts of all parts again takes seconds
        super().__init__(work, sources, settings, remarks, dtype)
        self._folder = PartFolder(settings)
        self._parts: list[tuple[InputPart, list[PartEntry]]] = []
        self._damaged: set[int] = set()

    def note_part(self, shard: InputPart) -> None:
        """Add a part whose content has been appended."""
        records = self._folder.records(shard)
        self._damaged |= {r.source for r, record in zip(shard.ranges, records, strict=True) if record["damage"]}
        entries = []
        for name, prefix, (tokens, sequences, documents) in zip(
            self._settings.key_names, self._prefixes, records[-1]["extents"], strict=True
        ):
            path = relative_to_list(prefix, str(self._folder.prefix(shard, name)))
            entries.append(PartEntry(path, sequences, documents, tokens))
        self._parts.append((shard, entries))

    @property
    def part_names(self) -> set[str]:
        """Names of the parts that the lists contain."""
        return {shard.name for shard, _ in self._kept()}

    def save(self) -> None:
        """Nothing: the parts are the progress."""

    def publish(self) -> None:
        """Write the lists, and remove an earlier pair of each name."""
        self._note_extents()
        sync_file(self._open_remarks)
        self.close()
        for number, prefix in enumerate(self._prefixes):
            entries = [entries[number] for _, entries in self._kept()]
            for path in (get_bin_path(prefix), get_idx_path(prefix)):
                Path(path).unlink(missing_ok=True)
            with atomic_write(get_parts_path(prefix)) as file:
                file.write(PartList(self._dtype, tuple(entries)).encoded())
        self._publish_remarks()

    def _kept(self) -> list[tuple[InputPart, list[PartEntry]]]:
        """The parts, except those of damaged files; a part of several files is without the damaged ones."""
        return [
            (shard, entries)
            for shard, entries in self._parts
            if not (len(shard.sources) == 1 and set(shard.sources) <= self._damaged)
        ]
