"""The data files of a run, with counts and hashes; a resumed run compares them with those in its checkpoint."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from xxhash import xxh3_128

from megatron_core.config import DataConfig
from megatron_core.datasets.blend import parse_blend
from megatron_core.datasets.indexed import HEADER, DType, get_bin_path, get_idx_path, in_place_of_pair
from megatron_core.datasets.paths import NAMES, read_paths
from megatron_core.locations import local_copy, location, read_part

BLOCK_BYTES = 1 << 16
BLOCKS = 16
"""Number of blocks of a token file that are hashed, evenly spaced; a smaller file is hashed completely."""
READ_BYTES = 1 << 23

Record = dict[str, Any]


@dataclass(frozen=True)
class DataSource:
    """A data file, as a run found it.

    use: `train`, `valid` or `test`; `all` for files divided by --split; `phase N` with --data-phases. weight: as given.
    documents, sequences, tokens: of a token file; for a file of conversations, its lines are `documents`. index_hash:
    of the .idx file. token_hash: of the .bin file's size and blocks, or of a complete file of conversations.
    """

    use: str
    path: str
    weight: float | None
    documents: int
    sequences: int
    tokens: int
    index_hash: str
    token_hash: str

    @property
    def content(self) -> tuple[int, int, int, str, str]:
        """Counts and hashes, which change with the file's content."""
        return self.documents, self.sequences, self.tokens, self.index_hash, self.token_hash

    @property
    def counts(self) -> str:
        """The counts, for messages."""
        if not self.sequences:
            return f"{self.documents:,} lines"
        return f"{self.documents:,} documents, {self.sequences:,} sequences and {self.tokens:,} tokens"


FileContent = tuple[int, int, int, str, str]
"""``DataSource.content`` of a file: documents, sequences, tokens, hash of the index, hash of the tokens."""


def record_sources(data: DataConfig, content_of: Callable[[str], FileContent] | None = None) -> list[Record]:
    """A record of each file of `data`, in the order of the flags; none for mock data and data sets of a script.

    `content_of` reads a file; default: `token_file_content`.
    """
    if data.mock_data or data.dataloader_type == "external":
        return []
    paths = read_paths(data)
    if paths.phases:
        single = len(paths.phases) == 1
        lists = [("all" if single else f"phase {n}", phase.data_path) for n, phase in enumerate(paths.phases, 1)]
    else:
        lists = list(zip(NAMES, paths.by_split, strict=True))
    files = []
    for use, blend in lists:
        weights, names = parse_blend(blend) if blend else (None, ())
        files += [(use, path, None if weights is None else weights[n]) for n, path in enumerate(names)]
    distinct = list(dict.fromkeys(path for _, path, _ in files))
    with ThreadPoolExecutor(data.num_dataset_builder_threads) as threads:
        contents = dict(zip(distinct, threads.map(content_of or token_file_content, distinct), strict=True))
    return [asdict(DataSource(use, path, weight, *contents[path])) for use, path, weight in files]


def is_record(value: object) -> bool:
    """Whether a value read from a checkpoint is a record: its fields with their types."""
    if not isinstance(value, dict) or value.keys() != {entry.name for entry in fields(DataSource)}:
        return False
    return all(isinstance(value[entry.name], cast(Any, entry.type)) for entry in fields(DataSource))


def describe_changes(before: Sequence[Record], now: Sequence[Record], samples: int) -> list[str]:
    """Describe changes of the data since a checkpoint at `samples` samples, and their effect; empty without changes."""
    old = _keyed(before)
    new = _keyed(now)
    sentences = []
    for is_training in (True, False):
        changes = _Changes(
            *({key: s for key, s in sources.items() if (key[0] in NAMES[1:]) != is_training} for sources in (old, new))
        )
        if effect := changes.effect(samples, is_training=is_training):
            sentences.append(f"the data has changed since the checkpoint: {'; '.join(changes.facts)}: {effect}")
        elif changes.facts:
            sentences.append(f"the data has not changed since the checkpoint: {'; '.join(changes.facts)}")
    return sentences


Key = tuple[str, str, int]


class _Changes:
    """The differences between two lists of files of one use."""

    def __init__(self, old: dict[Key, DataSource], new: dict[Key, DataSource]) -> None:
        self.facts: list[str] = []
        self._reordered = self._reread = self._replaced = False
        pairs = {key: key for key in old if key in new}
        for key in (key for key in old if key not in new):
            same = [k for k in new if k not in pairs.values() and (k[0], new[k].content) == (key[0], old[key].content)]
            if same:
                pairs[key] = same[0]
                self.facts.append(f"{old[key].path} was renamed to {new[same[0]].path}")
        # Files are compared by use and path first, so that a file with new content is not taken for a new file.
        for key, other in pairs.items():
            self._compare(old[key], new[other])
        removed = [k for k in old if k not in pairs]
        added = [k for k in new if k not in pairs.values()]
        self.facts += [f"{old[key].path} is no longer read" for key in removed]
        self.facts += [f"{new[key].path} is new, with {new[key].counts}" for key in added]
        self._reread |= bool(removed or added)
        common = [pairs[key] for key in old if key in pairs]
        if common != [key for key in new if key in common]:
            self.facts.append("the order of the files changed")
            self._reread = True
        if not removed and not added:
            self._compare_shares([old[key] for key in pairs], [new[key] for key in pairs.values()])

    def _compare(self, was: DataSource, now: DataSource) -> None:
        if was.content[:3] != now.content[:3]:
            self.facts.append(f"{now.path} had {was.counts}, now {now.counts}")
            self._reordered = True
        elif was.index_hash != now.index_hash:
            self.facts.append(f"{now.path} has as many tokens, but sequences of different lengths")
            self._reordered = True
        elif was.token_hash != now.token_hash:
            unit = "tokens in sequences of the same lengths" if now.sequences else "text in as many lines"
            self.facts.append(f"{now.path} has different {unit}")
            self._replaced = True

    def _compare_shares(self, old: Sequence[DataSource], new: Sequence[DataSource]) -> None:
        for source, was, share in zip(new, _shares(old), _shares(new), strict=True):
            if was != share:
                self.facts.append(f"{source.path} had {_shown(was)} of its blend, now {_shown(share)}")
                self._reread = True

    def effect(self, samples: int, *, is_training: bool) -> str:
        """The effect of the changes on the samples; empty if there is none."""
        if not (self._reordered or self._reread or self._replaced):
            return ""
        if not is_training:
            return "the losses of this evaluation are not comparable with those before the checkpoint"
        if self._reordered:
            return (
                f"from sample {samples:,} on, samples have new boundaries and a new order, so in this epoch some "
                "text may be repeated and other text may be missed"
            )
        if self._reread:
            return (
                f"from sample {samples:,} on, each file continues at a different sample, so in this epoch some samples "
                "may be repeated and others missed"
            )
        return f"the order of samples is the same, and from sample {samples:,} on they have the new text"


def _keyed(records: Sequence[Record]) -> dict[Key, DataSource]:
    """Sources by use, path and, for a file that occurs several times, its number."""
    seen: Counter[tuple[str, str]] = Counter()
    keyed = {}
    for source in (DataSource(**record) for record in records):
        seen[source.use, source.path] += 1
        keyed[source.use, source.path, seen[source.use, source.path]] = source
    return keyed


def _shares(sources: Sequence[DataSource]) -> list[float | None]:
    """The share of each source in the blend of its use; None if sizes decide."""
    totals: defaultdict[str, float] = defaultdict(float)
    for source in sources:
        totals[source.use] += source.weight or 0.0
    return [None if source.weight is None else round(source.weight / totals[source.use], 9) for source in sources]


def _shown(share: float | None) -> str:
    return "a share by size" if share is None else f"{share:.4%}"


def token_file_content(prefix: str) -> FileContent:
    """Counts and hashes of a token file whose index was already checked."""
    if (in_parts := in_place_of_pair(prefix)) is not None:
        return cast(FileContent, in_parts.content())
    index = local_copy(location(get_idx_path(prefix)))
    tokens = location(get_bin_path(prefix))
    with index.open("rb") as file:
        _, _, code, sequences, entries = HEADER.unpack(file.read(HEADER.size))
    size = tokens.stat().st_size
    return entries - 1, sequences, size // DType.size(code), file_hash(index), _hash_blocks(tokens, size)


def file_hash(path: Path) -> str:
    """The hash of a whole file."""
    digest = xxh3_128()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _hash_blocks(path: Path, size: int) -> str:
    digest = xxh3_128(size.to_bytes(8, "little"))
    # Not all of it: reading terabytes would delay every start. A file that another tool wrote differs almost
    # everywhere, so a few blocks are enough to notice it.
    starts: Sequence[int] = range(0, size, BLOCK_BYTES)
    if len(starts) > BLOCKS:
        starts = [(size - BLOCK_BYTES) * n // (BLOCKS - 1) for n in range(BLOCKS)]
    for start in starts:
        digest.update(read_part(path, start, BLOCK_BYTES))
    return digest.hexdigest()
