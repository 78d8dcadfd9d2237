"""Joining the parts: their bytes are appended to the growing files of each key, in order."""

import os
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path
from typing import BinaryIO

from megatron_core.datasets.aside import aside, close_quietly, naming_the_place, put_on_disk
from megatron_core.datasets.index_format import get_bin_path, get_idx_path
from megatron_core.datasets.prepare.inputs import Source
from megatron_core.datasets.prepare.journal import State, WorkFolder
from megatron_core.datasets.prepare.parts import BlockHead, read_part
from megatron_core.datasets.prepare.readers import PLACE_WORDS
from megatron_core.datasets.token_writer import Extent, TokenWriter, publish_pair
from megatron_core.errors import DataError

SHOWN = 5


class BrokenDocument(DataError):
    """The first broken document, for `--strict`; without that flag the same run goes on."""


class Joiner:
    """Appends parts to the files of every key and to the list of broken and empty documents."""

    def __init__(
        self, work: WorkFolder, sources: Sequence[Source], prefixes: Sequence[str], remarks: Path, dtype: str
    ) -> None:
        self._work = work
        self._sources = sources
        self._prefixes = prefixes
        self._remarks_path = remarks
        self._dtype = dtype
        found = work.read()
        if found is not None and not found.publishing and not all(map(os.path.exists, self._asides())):
            found = None  # Somebody removed the growing files.
        self.state = found or State()
        # The files that lie behind, and their bytes.
        self._before = (0, 0)
        self._writers: list[TokenWriter] = []
        self._remarks: BinaryIO | None = None
        if self.state.publishing:
            return
        extents = self.state.extents or [None] * len(prefixes)
        self._writers = [
            TokenWriter(get_bin_path(prefix), dtype, resume=extent)
            for prefix, extent in zip(prefixes, extents, strict=True)
        ]
        aside(remarks).parent.mkdir(parents=True, exist_ok=True)
        self._remarks = aside(remarks).open("wb" if found is None else "r+b")
        self._remarks.truncate(self.state.remarks)
        self._remarks.seek(self.state.remarks)

    def append(self, part: BinaryIO | mmap, strict: bool) -> None:
        """Append a part; BrokenDocument for the first broken document if `strict`."""
        for head, keys in read_part(part, self._dtype):
            if head.source != self.state.source:
                self.state.source, self.state.lines, self.state.at = head.source, 0, 0
            self._remark(head, strict)
            for writer, part in zip(self._writers, keys, strict=True):
                writer.append(part.tokens, part.lengths, part.counts)
            self.state.lines += head.lines
            self.state.documents += head.documents
            self.state.size += head.size
            self.state.at = max(self.state.at, head.at)

    def check_strict(self) -> None:
        """BrokenDocument if an earlier run, which was not strict, met one."""
        if self.state.broken:
            raise BrokenDocument(f"{self.state.first[0]} (--strict)")

    @property
    def tokens(self) -> int:
        """Tokens of all keys together."""
        return sum(writer.extent.tokens for writer in self._writers)

    @property
    def done(self) -> int:
        """Bytes of the input files, on the disk, that are joined."""
        while self._before[0] < self.state.source:
            number, size = self._before
            self._before = (number + 1, size + self._sources[number].size)
        return self._before[1] + self.state.at

    def checkpoint(self, position: tuple[int, int]) -> None:
        """Put all that is joined on the disk, and note it in the journal."""
        self.state.group, self.state.index = position
        self._note([writer.sync() for writer in self._writers])

    def publish(self) -> None:
        """Write the indices and give all files their names; called again after an interruption, it does the rest."""
        if not self.state.publishing:
            self._finish_files()
        for prefix in self._prefixes:
            publish_pair(get_bin_path(prefix), get_idx_path(prefix))
        if aside(self._remarks_path).exists():
            os.replace(aside(self._remarks_path), self._remarks_path)
        if not self.state.remarks:
            self._remarks_path.unlink(missing_ok=True)

    def _finish_files(self) -> None:
        for prefix, writer in zip(self._prefixes, self._writers, strict=True):
            writer.write_index(get_idx_path(prefix))
        self.state.publishing = True
        self._note([writer.extent for writer in self._writers])
        self.close()

    def _note(self, extents: list[Extent]) -> None:
        self.state.extents = extents
        put_on_disk(self._remarks)
        self.state.remarks = self._remarks.tell()
        self._work.write(self.state)

    def close(self) -> None:
        """Close the growing files and leave them as they are."""
        for writer in self._writers:
            writer.close()
        if self._remarks is not None:
            close_quietly(self._remarks)

    def discard(self) -> None:
        """Remove the growing files."""
        self.close()
        for writer in self._writers:
            writer.discard()
        aside(self._remarks_path).unlink(missing_ok=True)
        for prefix in self._prefixes:
            aside(get_idx_path(prefix)).unlink(missing_ok=True)

    def _asides(self) -> list[Path]:
        return [*(aside(get_bin_path(prefix)) for prefix in self._prefixes), aside(self._remarks_path)]

    def _remark(self, head: BlockHead, strict: bool) -> None:
        source = self._sources[head.source]
        word = PLACE_WORDS[source.kind]
        for place, kind, sentence in head.remarks:
            words = f"{source.path}, {word} {self.state.lines + place} {sentence}"
            line = f"{kind}: {words}\n".encode("utf-8", errors="backslashreplace")
            with naming_the_place(self._remarks):
                self._remarks.write(line)
            if kind == "empty":
                self.state.empty += 1
                continue
            if strict:
                raise BrokenDocument(f"{words} (--strict)")
            self.state.broken += 1
            if len(self.state.first) < SHOWN:
                self.state.first.append(words)
