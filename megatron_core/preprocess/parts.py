"""Parts of a run: token files of ranges of the input, written by any process, and joined in the order of the input.

`PREFIX.parts/NAME` has, for each key, `KEY_document.bin` and `.idx`, a list of broken and empty documents
(`remarks.jsonl`), and counts of each range (`part.json`). A part is written under a name of its own and renamed when it
is complete. So a process that is killed leaves nothing that is read, and two that write the same part, because one was
believed to be dead, do not disturb each other. Memory: as for a worker of one machine.
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_core.datasets.indexed import IndexedDataset, blocks, get_bin_path, get_idx_path
from megatron_core.errors import DataError
from megatron_core.output_file import make_folder
from megatron_core.preprocess.atomic_write import atomic_write, naming_full_disk, open_partial, sync_file
from megatron_core.preprocess.builder import TokenWriter
from megatron_core.preprocess.plan import InputPart, divide_range, group_pieces
from megatron_core.preprocess.settings import PreprocessSettings
from megatron_core.preprocess.worker import Encoded, EncodedPart, InputRange, Worker

# A network file system may show the new name of a folder to another host only after its cache has expired.
VISIBLE_SECONDS = 60.0


class PartFolder:
    """`PREFIX.parts`."""

    def __init__(self, settings: PreprocessSettings) -> None:
        self.path = parts_path(settings)
        self._settings = settings
        make_folder(self.path)

    def finished(self) -> set[str]:
        """The names of the complete parts."""
        return {path.name for path in self.path.iterdir() if "." not in path.name}

    def write(self, shard: InputPart, worker: Worker) -> None:
        """Tokenize a part, unless it is complete; DataError if the backend gives wrong ids."""
        if self._folder(shard).exists():
            return
        attempt = self.path / f"{shard.name}.{uuid.uuid4().hex}"
        make_folder(attempt)
        try:
            with _PartWriter(attempt, self._settings, worker) as writer:
                for file_range in shard.ranges:
                    writer.append_range(file_range, shard)
                writer.finalize()
            try:
                os.rename(attempt, self._folder(shard))
            except OSError:
                if not self._folder(shard).exists():  # another process has finished the same part
                    raise
        finally:
            shutil.rmtree(attempt, ignore_errors=True)

    def read(self, shard: InputPart) -> Iterator[EncodedPart]:
        """Yield the content of each range of a complete part; DataError if the part is missing or damaged.

        If parts are kept, the tokens are not read: the arrays are ranges of the same lengths.
        """
        folder = self._folder(shard)
        records = self.records(shard)
        names = self._settings.key_names
        keep = self._settings.keep_parts
        datasets = [] if keep else [IndexedDataset(str(folder / name)) for name in names]
        with (folder / "remarks.jsonl").open(encoding="utf-8") as remarks:
            begin = [[0, 0, 0]] * len(names)
            for file_range, record in zip(shard.ranges, records, strict=True):
                extents = record["extents"]
                lines = islice(remarks, record["remarks"])
                yield EncodedPart(
                    replace(file_range, damage=record["damage"]),
                    raw=record["raw"],
                    size=record["size"],
                    lines=record["lines"],
                    documents=record["documents"],
                    dropped=record["dropped"],
                    encoded=_counts(begin, extents) if keep else _slices(datasets, begin, extents),
                    remarks=map(tuple, map(json.loads, lines)),
                )
                for _ in lines:  # not read if the whole file is left out
                    pass
                begin = extents

    def records(self, shard: InputPart) -> list[dict[str, Any]]:
        """The counts of the ranges of a complete part."""
        path = self._folder(shard) / "part.json"
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not path.exists():
            if time.monotonic() > deadline:
                raise DataError(
                    f"{path} is missing, although its part is complete; {self.path} must be on a file system that all "
                    "hosts share, and must not be changed during a run: run the same command again"
                )
            os.listdir(self.path)  # some file systems then read the folder again
            time.sleep(0.1)
        try:
            return list(json.loads(path.read_text(encoding="utf-8"))["ranges"])
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is damaged ({error}); remove {path.parent}, and run the command again") from None

    def prefix(self, shard: InputPart, key_name: str) -> Path:
        """Path prefix of a key's token files."""
        return self._folder(shard) / key_name

    def remove(self, shard: InputPart) -> None:
        """Remove a part."""
        shutil.rmtree(self._folder(shard), ignore_errors=True)

    def clean(self, names: Collection[str] = ()) -> None:
        """Remove all parts, complete or not, except those with the names in `names`, and the folder if it is empty."""
        for path in list(self.path.iterdir()):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            self.path.rmdir()

    def _folder(self, shard: InputPart) -> Path:
        return self.path / shard.name


def parts_path(settings: PreprocessSettings) -> Path:
    """Path of the folder of the parts."""
    return Path(f"{settings.output_prefix}.parts")


class _PartWriter(AbstractContextManager["_PartWriter"]):
    """The files of an unfinished part; a context that closes them."""

    def __init__(self, folder: Path, settings: PreprocessSettings, worker: Worker) -> None:
        self._folder = folder
        self._settings = settings
        self._worker = worker
        dtype = worker.layout.dtype
        self._prefixes = [str(folder / name) for name in settings.key_names]
        self._writers = [TokenWriter(get_bin_path(prefix), dtype) for prefix in self._prefixes]
        self._remarks: BinaryIO = open_partial(folder / "remarks.jsonl")
        self._ranges: list[dict[str, Any]] = []
        self._unpacked = folder / "unpacked"
        make_folder(self._unpacked)

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()
        self._remarks.close()

    def append_range(self, file_range: InputRange, shard: InputPart) -> None:
        """Tokenize a range; the output of a file that proves to be damaged is removed."""
        extents = [writer.extent for writer in self._writers]
        remarks_end = self._remarks.tell()
        total: dict[str, Any] = dict.fromkeys(("raw", "size", "lines", "documents", "dropped", "remarks"), 0)
        total["damage"] = ""
        limits = self._worker.limits
        source = shard.sources[file_range.source]
        pieces = divide_range(file_range, source, self._settings, limits, self._unpacked, limits.part_bytes)
        for group in group_pieces(pieces, limits.part_bytes):
            for encoded_part in self._worker.run(group):
                if encoded_part.piece.damage:
                    total["damage"] = encoded_part.piece.damage
                    break
                self._append(encoded_part, total)
            if total["damage"]:
                total |= {name: 0 for name, count in total.items() if isinstance(count, int)}
                for writer, extent in zip(self._writers, extents, strict=True):
                    writer.cut(extent)
                self._remarks.truncate(remarks_end)
                self._remarks.seek(remarks_end)
                break
        total["extents"] = [[e.tokens, e.sequences, e.documents] for e in (w.extent for w in self._writers)]
        self._ranges.append(total)

    def _append(self, encoded_part: EncodedPart, total: dict[str, Any]) -> None:
        for line, category, sentence in encoded_part.remarks:
            with naming_full_disk(self._remarks):
                self._remarks.write(json.dumps([total["lines"] + line, category, sentence]).encode("ascii") + b"\n")
            total["remarks"] += 1
        for encoded in encoded_part.encoded:
            for writer, sequences in zip(self._writers, encoded, strict=True):
                writer.append(sequences.tokens, sequences.lengths, sequences.counts)
        for name in ("size", "lines", "documents", "dropped"):
            total[name] += getattr(encoded_part, name)
        total["raw"] = encoded_part.raw

    def finalize(self) -> None:
        """Complete the files."""
        shutil.rmtree(self._unpacked)
        for writer, prefix in zip(self._writers, self._prefixes, strict=True):
            writer.finalize(get_idx_path(prefix))
        sync_file(self._remarks)
        with atomic_write(self._folder / "part.json") as file:
            file.write(json.dumps({"ranges": self._ranges}).encode("ascii"))


Extents = Sequence[Sequence[int]]
"""Number of tokens, sequences and documents of each key."""


def _counts(begin: Extents, end: Extents) -> list[list[Encoded]]:
    """The documents between two extents, as ranges in place of arrays."""
    pairs = zip(begin, end, strict=True)
    ranges: list[list[Any]] = [[range(b, e) for b, e in zip(low, high, strict=True)] for low, high in pairs]
    return [[Encoded(*of_key) for of_key in ranges]]


def _slices(datasets: Sequence[IndexedDataset], begin: Extents, end: Extents) -> Iterator[list[Encoded]]:
    """The documents between two extents, in blocks."""
    for first, stop in blocks(end[0][2] - begin[0][2]):
        yield [_documents(dataset, low[2] + first, low[2] + stop) for dataset, low in zip(datasets, begin, strict=True)]


def _documents(dataset: IndexedDataset, first: int, stop: int) -> Encoded:
    borders = np.asarray(dataset.document_indices[first : stop + 1])
    low = int(borders[0])
    high = int(borders[-1])
    lengths = np.asarray(dataset.sequence_lengths[low:high])
    start = int(dataset.sequence_pointers[low]) // dataset.itemsize if high > low else 0
    tokens = dataset.tokens(start, int(lengths.sum(dtype=np.int64)))
    return Encoded(tokens, lengths, np.diff(borders))
