"""Reads the parts of a list as one token file, without an index of all documents.

Opening reads the list, and the size and the header of each part: 80 bytes of memory for a part, whatever its number of
documents. A sample reads its tokens; a border between splits reads one entry of an index.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
from xxhash import xxh3_128

from megatron_core.data_parts.manifest import PartEntry, get_parts_path, read_parts
from megatron_core.datasets.indexed import HEADER, MAGIC, VERSION, DType, get_bin_path, get_idx_path, index_bytes
from megatron_core.datasets.sources import BLOCKS, FileContent
from megatron_core.errors import DataError
from megatron_core.locations import in_storage, location, read_part

# Requests at the same time when a data set is opened: on a network each takes milliseconds of waiting.
OPENERS = 32
# Open files of a data set in a process. Linux allows 1,024 by default for all.
MOST_OPEN = 256
# Tokens of the blocks that are hashed to recognise changes between a checkpoint and its resume.
HASHED_TOKENS = 1 << 15
_WAY_OUT = "copy the part again, or prepare the data again"


def open_parts(path_prefix: str) -> "PartsDataset | None":
    """The data set of a prefix with a list of parts; None without a list. DataError: both a list and a pair exist."""
    try:
        is_list = location(get_parts_path(path_prefix)).is_file()
    except OSError as error:
        raise DataError(f"token file {path_prefix}: {error}") from None
    if not is_list:
        return None
    if location(get_idx_path(path_prefix)).is_file():
        raise DataError(
            f"{path_prefix}: there is a list of parts ({get_parts_path(path_prefix)}) and also a pair; remove one"
        )
    return PartsDataset(path_prefix)


class PartsDataset:
    """The sequences of all parts in order, with the part of the interface of `IndexedDataset` that training reads.

    Every read gives what the pair that `megatron-merge-datasets` makes of the parts would give. DataError on opening: a
    part is missing, or differs from its counts in the list.
    """

    def __init__(self, path_prefix: str) -> None:
        self.path_prefix = path_prefix
        listed = read_parts(path_prefix)
        self.dtype = DType.dtype_from_code(DType[listed.dtype])
        self.itemsize = DType.size(self.dtype)
        self.parts = listed.parts
        self._folder = location(get_parts_path(path_prefix)).parent
        self._sequences = [0, *accumulate(shard.sequences for shard in self.parts)]
        self._tokens = [0, *accumulate(shard.tokens for shard in self.parts)]
        self.num_documents = sum(shard.documents for shard in self.parts)
        self.num_tokens = self._tokens[-1]
        with ThreadPoolExecutor(OPENERS) as threads:
            list(threads.map(self._check, self.parts))
        self._open = lru_cache(MOST_OPEN)(self._opened)
        self.sequence_pointers = _Entries(self._pointer)
        self.sequence_lengths = _Entries(self._length)

    def __len__(self) -> int:
        return self._sequences[-1]

    def prefix(self, shard: PartEntry) -> str:
        """The path prefix of a part."""
        return str(self._folder / shard.path)

    def tokens(self, first: int, count: int) -> np.ndarray:
        """`count` tokens from token `first` on, across sequences and parts: [count]."""
        number = bisect_right(self._tokens, first) - 1
        pieces = []
        while count:
            taken = min(count, self._tokens[number + 1] - first)
            if taken:
                position = (first - self._tokens[number]) * self.itemsize
                data = self._open(number)(position, taken * self.itemsize)
                pieces.append(np.frombuffer(data, dtype=self.dtype))
            first += taken
            count -= taken
            number += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def content(self) -> FileContent:
        """Counts and hashes, for the record in checkpoints: of the list, and of blocks of tokens spread over all."""
        digest = xxh3_128()
        starts: Sequence[int] = range(0, self.num_tokens, HASHED_TOKENS)
        if len(starts) > BLOCKS:
            starts = [(self.num_tokens - HASHED_TOKENS) * n // (BLOCKS - 1) for n in range(BLOCKS)]
        for start in starts:
            digest.update(self.tokens(start, min(HASHED_TOKENS, self.num_tokens - start)).tobytes())
        list_hash = xxh3_128(location(get_parts_path(self.path_prefix)).read_bytes()).hexdigest()
        return self.num_documents, len(self), self.num_tokens, list_hash, digest.hexdigest()

    def _pointer(self, sequence: int) -> int:
        """Position of a sequence's first token in the joined file, in bytes."""
        number = bisect_right(self._sequences, sequence) - 1
        local = sequence - self._sequences[number]
        before = self._tokens[number] * self.itemsize
        if not local:
            return before
        entry = HEADER.size + 4 * self.parts[number].sequences + 8 * local
        return before + int(self._entry(number, entry, "<q"))

    def _length(self, sequence: int) -> int:
        number = bisect_right(self._sequences, sequence) - 1
        return self._entry(number, HEADER.size + 4 * (sequence - self._sequences[number]), "<i")

    def _entry(self, number: int, position: int, layout: str) -> int:
        path = location(get_idx_path(self.prefix(self.parts[number])))
        try:
            return int(struct.unpack(layout, read_part(path, position, struct.calcsize(layout)))[0])
        except (OSError, struct.error) as error:
            raise DataError(f"{path} cannot be read at byte {position}: {error}; {_WAY_OUT}") from None

    def _check(self, shard: PartEntry) -> None:
        """Compare the sizes and the header of a part with the list."""
        prefix = self.prefix(shard)
        expected = {
            get_idx_path(prefix): index_bytes(shard.sequences, shard.documents + 1, multimodal=False),
            get_bin_path(prefix): shard.tokens * self.itemsize,
        }
        header = (MAGIC, VERSION, DType.code_from_dtype(self.dtype), shard.sequences, shard.documents + 1)
        try:
            sizes = {path: location(path).stat().st_size for path in expected}
            stored = read_part(location(get_idx_path(prefix)), 0, HEADER.size)
        except OSError as error:
            raise DataError(f"{prefix}, a part of {self.path_prefix}: {error}; {_WAY_OUT}") from None
        for path, size in expected.items():
            if sizes[path] != size:
                raise DataError(f"{path} has {sizes[path]:,} bytes, but the list of parts {size:,}; {_WAY_OUT}")
        if stored != HEADER.pack(*header):
            raise DataError(f"{get_idx_path(prefix)} has other counts or another dtype than the list; {_WAY_OUT}")

    def _opened(self, number: int) -> Callable[[int, int], Any]:
        path = location(get_bin_path(self.prefix(self.parts[number])))
        remote = in_storage(path)
        return _LocalTokens(path).read if remote is None else cast(Any, remote.open_tokens()).read


class _LocalTokens:
    """An open file; it is closed when the last thread that reads it has let it go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path} cannot be opened: {error}; {_WAY_OUT}") from None

    def read(self, position: int, length: int) -> bytes:
        """`length` bytes from a position on."""
        # Not mapped: a file that is truncated during the run would end the process without a message.
        data = os.pread(self._file.fileno(), length, position)
        if len(data) < length:
            raise DataError(f"{self._path} ended at byte {position + len(data):,} after it was opened; {_WAY_OUT}")
        return data


class _Entries:
    """Numbers that are read when they are indexed."""

    def __init__(self, read: Callable[[int], int]) -> None:
        self._read = read

    def __getitem__(self, index: int) -> int:
        return self._read(index)
