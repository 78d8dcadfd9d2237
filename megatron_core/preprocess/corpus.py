"""Statistics of token files, computed by tasks in any processes: equal for any number of workers and machines.

Each task reads a range of a `.bin` file and writes `PREFIX.parts/NAME`: counts, samples, and a record with the hash of
each document, sorted by the hash. Then tasks for ranges of hashes merge the records of all files and count duplicates.
Memory: of a task about 300 MB, whatever the size of the corpus; on disk 28 bytes for each document.
"""

import hashlib
import heapq
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from megatron_core.datasets.indexed import IndexedDataset, get_bin_path, get_idx_path
from megatron_core.errors import DataError
from megatron_core.locations import in_storage, location
from megatron_core.preprocess.atomic_write import atomic_write
from megatron_core.preprocess.lengths import EDGES, DocumentRanges, Lengths, binned

TASK_BYTES = 1 << 28
"""Bytes of tokens of a task."""
TASK_INDEX_BYTES = 1 << 26
"""Bytes of the index of these tokens: 3 million documents."""
READ_TOKENS = 1 << 22
BUCKETS = 1 << 12
"""Ranges of hashes whose positions a file of records begins with: the largest number of tasks that merge."""
BUCKET_DOCUMENTS = 1 << 22
"""Documents for a task that merges."""
LARGEST_GROUPS = 20
SAMPLE_TOKENS = 200
"""Tokens that are shown of a document."""
_RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<i8"), ("tokens", "<u4")])


@dataclass(frozen=True)
class CorpusOptions:
    """Settings that change the results of tasks."""

    longer_than: int | None
    """Documents of more tokens are counted as too long."""
    samples: int
    """Number of documents to show."""


@dataclass(frozen=True)
class RangeTask:
    """The documents of a file that begin in the bytes [begin, end); end None: all from there on."""

    name: str
    source: int
    """Number of the source."""
    prefix: str
    begin: int
    end: int | None

    @property
    def place(self) -> str:
        """Its beginning, for messages."""
        return f"{get_bin_path(self.prefix)}, byte {self.begin:,}"

    def write(self, path: Path, options: CorpusOptions) -> None:
        """Write the counts and records."""
        dataset = IndexedDataset(self.prefix)
        ranges = DocumentRanges(dataset)
        first = ranges.first_from(self.begin)
        stop = ranges.count if self.end is None else ranges.first_from(self.end)
        lengths = ranges.lengths(first, stop)
        records = np.zeros(stop - first, _RECORD)
        records["document"] = np.arange(first, stop)
        records["tokens"] = lengths
        records["high"], records["low"] = _hashes(dataset, int(ranges.starts(first, first + 1)[0]), lengths).T
        counts = _counts(lengths, first, options)
        records = records[lengths > 0]
        counts["samples"] = self._samples(dataset, ranges, records, options.samples)
        records = records[np.lexsort((records["low"], records["high"]))]
        positions = np.searchsorted(records["high"] >> np.uint64(52), np.arange(BUCKETS + 1))
        with atomic_write(path) as file:
            text = json.dumps(counts).encode()
            file.write(len(text).to_bytes(8, "little") + text)
            file.write(positions.astype("<i8").tobytes())
            file.write(records.tobytes())

    def _samples(self, dataset: IndexedDataset, ranges: DocumentRanges, records: np.ndarray, most: int) -> list[Any]:
        """The documents whose hash of source and number is smallest: [that hash, number, length, first tokens]."""
        numbered = zip(records["document"].tolist(), records["tokens"].tolist(), strict=True)
        keys = ((xxh3_64_intdigest(f"{self.prefix} {n}".encode()), n, length) for n, length in numbered)
        chosen: list[Any] = []
        for key, number, length in heapq.nsmallest(most, keys):
            start = int(ranges.starts(number, number + 1)[0])
            chosen.append([key, number, length, dataset.tokens(start, min(length, SAMPLE_TOKENS)).tolist()])
        return chosen


def _hashes(dataset: IndexedDataset, start: int, lengths: np.ndarray) -> np.ndarray:
    """The two halves of the hash of each document, [D, 2]; of equal tokens equal, whatever their dtype."""
    digests = bytearray()
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first] - lengths[first])
        stop = max(first + 1, int(np.searchsorted(ends, before + READ_TOKENS, side="right")))
        tokens = dataset.tokens(start + before, int(ends[stop - 1]) - before)
        data = np.ascontiguousarray(tokens, "<i8").view(np.uint8).data
        borders = [0, *((ends[first:stop] - before) * 8).tolist()]
        digests += b"".join(xxh3_128_digest(data[low:high]) for low, high in pairwise(borders))
        first = stop
    return np.frombuffer(digests, ">u8").reshape(-1, 2)


def _counts(lengths: np.ndarray, first: int, options: CorpusOptions) -> dict[str, Any]:
    documents, tokens = binned(lengths)
    limit = np.iinfo(np.int64).max if options.longer_than is None else options.longer_than
    is_long = lengths > limit
    longest = int(lengths.argmax()) if len(lengths) else 0
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "empty": int(documents[0]),
        "too long": int(is_long.sum()),
        "tokens beyond": int((lengths[is_long] - limit).sum()),
        "longest": [int(lengths[longest]), first + longest] if len(lengths) else [0, 0],
        "shortest": int(lengths.min()) if len(lengths) else None,
        "lengths": [[int(n), int(documents[n]), int(tokens[n])] for n in np.flatnonzero(documents)],
    }


def read_counts(path: Path) -> dict[str, Any]:
    """The counts of a range. DataError: damaged."""
    try:
        with path.open("rb") as file:
            return json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, MemoryError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it, and run the command again") from None


def plan_ranges(sources: Sequence[Sequence[str]], options: CorpusOptions) -> list[RangeTask]:
    """The tasks of the files of each source, in order. Errors: ``OSError``."""
    tasks = []
    for source, prefixes in enumerate(sources):
        for number, prefix in enumerate(prefixes):
            states = [_state(get_bin_path(prefix)), _state(get_idx_path(prefix))]
            size = location(get_bin_path(prefix)).stat().st_size
            pieces = -(-location(get_idx_path(prefix)).stat().st_size // TASK_INDEX_BYTES)
            pieces = max(pieces, -(-size // TASK_BYTES), 1)
            borders = [*(size * piece // pieces for piece in range(pieces)), None]
            for begin, end in pairwise(borders):
                content = [asdict(options), source, number, prefix, states, begin, end]
                name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
                tasks.append(RangeTask(name, source, prefix, begin or 0, end))
    return tasks


def _state(path: str) -> str:
    remote = in_storage(location(path))
    if remote is not None:
        return remote.cached_folder().name
    status = location(path).stat()
    return f"{status.st_size} {status.st_mtime_ns}"


@dataclass(frozen=True)
class MergeTask:
    """Documents whose hash is in range `number` of `total`."""

    name: str
    number: int
    total: int
    ranges: tuple[RangeTask, ...]

    @property
    def place(self) -> str:
        """For messages."""
        return f"the hashes of range {self.number} of {self.total}"

    def write(self, path: Path, _: CorpusOptions) -> None:
        """Write the duplicates of each source and the largest groups of equal documents."""
        runs = [self._records(path.parent / task.name) for task in self.ranges]
        records = np.concatenate(runs)
        task = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        # Stable: within a group the documents stay in the order of the corpus, and the first one is the original.
        order = np.lexsort((records["low"], records["high"]))
        records = records[order]
        task = task[order]
        is_first = np.ones(len(records), bool)
        is_first[1:] = (records["high"][1:] != records["high"][:-1]) | (records["low"][1:] != records["low"][:-1])
        starts = np.flatnonzero(is_first)
        sizes = np.diff(starts, append=len(records))
        source = np.array([task.source for task in self.ranges])[task[~is_first]]
        tokens = records["tokens"][~is_first]
        duplicates = {}
        for number in np.unique(source).tolist():
            of_source = source == number
            duplicates[number] = [int(of_source.sum()), int(tokens[of_source].sum(dtype=np.int64))]
        groups = []
        # By place in the corpus if sizes are equal, which does not depend on the ranges.
        largest = np.lexsort((records["document"][starts], task[starts], -sizes))[:LARGEST_GROUPS]
        for group in largest.tolist():
            original = starts[group]
            if sizes[group] > 1:
                entry = [int(sizes[group]), int(task[original]), *map(int, records[original].tolist()[2:])]
                groups.append(entry)
        with atomic_write(path) as file:
            file.write(json.dumps({"duplicates": duplicates, "groups": groups}).encode())

    def _records(self, path: Path) -> np.ndarray:
        first, stop = (n * BUCKETS // self.total for n in (self.number, self.number + 1))
        with path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            file.seek(begin + 8 * first)
            low = int.from_bytes(file.read(8), "little")
            file.seek(begin + 8 * stop)
            high = int.from_bytes(file.read(8), "little")
            file.seek(begin + 8 * (BUCKETS + 1) + low * _RECORD.itemsize)
            records = np.frombuffer(file.read((high - low) * _RECORD.itemsize), _RECORD)
        if len(records) < high - low:
            raise DataError(f"{path} is truncated; remove it, and run the command again")
        return records


def plan_merge(ranges: Sequence[RangeTask], documents: int) -> list[MergeTask]:
    """The tasks that merge the records of a number of documents."""
    total = 1
    while total < BUCKETS and documents > total * BUCKET_DOCUMENTS:
        total *= 2
    content = hashlib.sha256(" ".join(task.name for task in ranges).encode()).hexdigest()[:24]
    return [MergeTask(f"{content}-{number}-{total}", number, total, tuple(ranges)) for number in range(total)]


def merged(
    folder: Path, names: Sequence[str], ranges: Sequence[RangeTask], merges: Sequence[MergeTask], options: CorpusOptions
) -> dict[str, Any]:
    """The statistics of the corpus and of each source, from the files of all tasks."""
    sources = [_Total(name, options) for name in names]
    corpus = _Total("all", options)
    samples: list[list[Any]] = []
    for task in ranges:
        counts = read_counts(folder / task.name)
        samples += [[*sample, task.prefix] for sample in counts["samples"]]
        samples = sorted(samples)[: options.samples]
        for total in (sources[task.source], corpus):
            total.add(counts, task.prefix)
    groups: list[list[Any]] = []
    for merge in merges:
        content = json.loads((folder / merge.name).read_bytes())
        for number, (documents, tokens) in content["duplicates"].items():
            for total in (sources[int(number)], corpus):
                total.values["duplicates"] += documents
                total.values["duplicate tokens"] += tokens
        groups += content["groups"]
    groups = sorted(groups, key=lambda group: (-group[0], group[1:]))[:LARGEST_GROUPS]
    return {
        "corpus": corpus.result(),
        "sources": [total.result() for total in sources],
        "most frequent documents": [
            {"times": times, "file": ranges[task].prefix, "document": number, "tokens": tokens}
            for times, task, number, tokens in groups
        ],
        "samples": [
            {"file": prefix, "document": number, "tokens": length, "ids": ids}
            for _, number, length, ids, prefix in samples
        ],
    }


class _Total:
    """Sums over ranges."""

    def __init__(self, name: str, options: CorpusOptions) -> None:
        self.values: dict[str, Any] = {"name": name, "documents": 0, "tokens": 0, "empty": 0}
        self.values |= {"longer than": options.longer_than, "too long": 0, "tokens beyond": 0}
        self.values |= {"duplicates": 0, "duplicate tokens": 0, "shortest": None}
        self.values["longest"] = {"tokens": 0, "file": "", "document": 0}
        self._lengths = np.zeros((2, len(EDGES) + 1), np.int64)

    def add(self, counts: dict[str, Any], prefix: str) -> None:
        """Add a range."""
        for name in ("documents", "tokens", "empty", "too long", "tokens beyond"):
            self.values[name] += counts[name]
        known = [n for n in (self.values["shortest"], counts["shortest"]) if n is not None]
        self.values["shortest"] = min(known, default=None)
        tokens, document = counts["longest"]
        if tokens > self.values["longest"]["tokens"]:
            self.values["longest"] = {"tokens": tokens, "file": prefix, "document": document}
        for entry, documents, tokens in counts["lengths"]:
            self._lengths[:, entry] += documents, tokens

    def result(self) -> dict[str, Any]:
        """The values, quantiles, and the histogram: [shortest length, documents, tokens] of each bin with documents."""
        documents, tokens = self._lengths
        lengths = Lengths(
            documents, tokens, self.values["shortest"] or 0, self.values["longest"]["tokens"], "documents"
        )
        lows = [0, *EDGES.tolist()]
        filled = np.flatnonzero(self._lengths[0]).tolist()
        figures = {"mean": lengths.mean} | {f"{share:.0%}": lengths.quantile(share) for share in (0.5, 0.9, 0.99)}
        return self.values | figures | {"lengths": [[lows[n], *self._lengths[:, n].tolist()] for n in filled]}


def lengths_of(result: dict[str, Any]) -> Lengths:
    """The histogram of a result."""
    counts = np.zeros((2, len(EDGES) + 1), np.int64)
    for low, documents, tokens in result["lengths"]:
        counts[:, np.searchsorted(EDGES, low, side="right")] = documents, tokens
    return Lengths(counts[0], counts[1], result["shortest"] or 0, result["longest"]["tokens"], "documents")
