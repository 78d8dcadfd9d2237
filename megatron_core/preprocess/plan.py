"""Division of the input into pieces, tasks and parts."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from megatron_core.preprocess.inputs import DamagedFileError, InputFile
from megatron_core.preprocess.readers import content_blocks, open_parquet
from megatron_core.preprocess.settings import Limits, PreprocessSettings
from megatron_core.preprocess.worker import InputRange

# Workers are idle during the last tasks: with 12 tasks each at most 4% of the time. A task costs half a millisecond.
TASKS_PER_WORKER = 12
SMALL_TASK = 1 << 18
MOST_PIECES = 1000
LARGEST_PIECE = 4
"""Row groups with more content than this number of tasks are read in blocks, which limits the memory of a worker."""


def read_pieces(
    settings: PreprocessSettings,
    sources: Sequence[InputFile],
    limits: Limits,
    folder: Path,
    size: int,
    position: tuple[int, int],
) -> Iterator[InputRange]:
    """Yield the pieces of all files from a position on; this process reads files that can only be read sequentially.

    size: bytes of the ranges into which plain JSON Lines and Parquet files are divided.
    """
    for file_range in whole_ranges(sources, position):
        yield from divide_range(file_range, sources[file_range.source], settings, limits, folder, size)


def whole_ranges(sources: Sequence[InputFile], position: tuple[int, int]) -> Iterator[InputRange]:
    """Yield the rest of each file from a position on."""
    first, start = position
    for number in range(first, len(sources)):
        yield InputRange(number, start if number == first else 0, size=sources[number].size)


def divide_range(
    file_range: InputRange, source: InputFile, settings: PreprocessSettings, limits: Limits, folder: Path, size: int
) -> Iterator[InputRange]:
    """Yield the pieces of a range of a file, as in `read_pieces`."""
    number = file_range.source
    keys = settings.json_keys
    if source.format == "text" and settings.separator is None:
        yield InputRange(number, raw=source.size, size=source.size)
        return
    try:
        for piece in divide_file(file_range, source, keys, size) if can_be_divided(source) else [file_range]:
            if can_be_divided(source) and piece.size <= LARGEST_PIECE * limits.part_bytes:
                yield piece
                continue
            for block in content_blocks(source, keys, settings.separator, limits, folder, piece.start, piece.end):
                yield InputRange(number, piece.start, block.end, block=block)
    except DamagedFileError as error:
        yield InputRange(number, damage=str(error))


def can_be_divided(source: InputFile) -> bool:
    """Whether a worker can begin to read the file at any byte or row group."""
    return source.format != "text" and source.compression is None


def divide_file(file_range: InputRange, source: InputFile, keys: Sequence[str], size: int) -> Iterator[InputRange]:
    """Yield ranges of a plain file that end at multiples of `size` bytes of content, whatever their start; in a Parquet
    file at the first row group from there on."""
    if source.format == "jsonl":
        yield from divide_lines(file_range, source, size)
        return
    try:
        with open_parquet(source, keys, Path()) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    except DamagedFileError:  # named when it is read
        yield file_range
        return
    rows = np.cumsum([0, *(group.num_rows for group in groups)])
    content = np.cumsum([0, *(group.total_byte_size for group in groups)])
    stop = int(rows[-1]) if file_range.end is None else file_range.end
    borders = rows[1:-1][np.diff(content[:-1] // size) > 0].tolist()
    inside = [row for row in borders if file_range.start < row < stop]
    for begin, end in pairwise([file_range.start, *inside, file_range.end]):
        last_row = stop if end is None else end
        low, high = np.interp([begin, last_row], rows, content).astype(int).tolist()
        raw = source.size * last_row // max(1, int(rows[-1]))
        yield InputRange(file_range.source, begin, end, raw, size=high - low)


def divide_lines(file_range: InputRange, source: InputFile, size: int) -> Iterator[InputRange]:
    """Yield ranges of a plain JSON Lines file that end at multiples of `size`, whatever their start."""
    stop = source.size if file_range.end is None else file_range.end
    for begin in [file_range.start, *range((file_range.start // size + 1) * size, stop, size)]:
        end = (begin // size + 1) * size
        if begin < stop:
            border = end if end < stop else file_range.end
            yield InputRange(file_range.source, begin, border, raw=min(end, stop), size=min(end, stop) - begin)


def group_pieces(pieces: Iterable[InputRange], size: int) -> Iterator[list[InputRange]]:
    """Group pieces into tasks of `size` bytes or slightly more, so that many small files make few tasks."""
    group: list[InputRange] = []
    total = 0
    for piece in pieces:
        group.append(piece)
        total += piece.block.size if piece.block else piece.size
        if total >= size or len(group) >= MOST_PIECES:
            yield group
            group = []
            total = 0
    if group:
        yield group


@dataclass(frozen=True)
class InputPart:
    """Ranges of the input that one task turns into token files of its own.

    name: digest of the settings, files and ranges, so that a part of other input is never taken for this one. sources:
    the files of the ranges, by their index in the input.
    """

    name: str
    ranges: tuple[InputRange, ...]
    sources: Mapping[int, InputFile]

    @property
    def place(self) -> str:
        """Its beginning, for messages."""
        first = self.ranges[0]
        source = self.sources[first.source]
        return f"{source.path}, {'row' if source.format == 'parquet' else 'byte'} {first.start:,}"

    @property
    def size(self) -> int:
        """Number of bytes of the ranges."""
        return sum(piece.size for piece in self.ranges)


def plan_parts(
    sources: Sequence[InputFile], identity: Mapping[str, Any], size: int, position: tuple[int, int]
) -> list[InputPart]:
    """Divide the input from a position on into parts of about `size` bytes.

    A plain JSON Lines or Parquet file that is longer is divided as in `divide_file`; other files are never divided, and
    small ones share a part. So the parts after a border are the same from any earlier border on, and a run that resumes
    finds finished parts. identity: the settings that determine the tokens.
    """
    shards: list[InputPart] = []
    times: Counter[str] = Counter()

    def add(ranges: Sequence[InputRange]) -> None:
        files = {entry.source: sources[entry.source] for entry in ranges}
        content = [[astuple(files[entry.source]), entry.start, entry.end] for entry in ranges]
        digest = xxh3_128(json.dumps([identity, content]).encode()).hexdigest()
        # A file that is given twice has two parts of the same content.
        shards.append(InputPart(f"{digest}-{times[digest]}", tuple(ranges), files))
        times[digest] += 1

    group: list[InputRange] = []
    group_size = 0
    for file_range in whole_ranges(sources, position):
        source = sources[file_range.source]
        # The ranges of a divided file are alone in their parts: if it is damaged, all of them are left out.
        alone = can_be_divided(source) and (source.size > size or file_range.start > 0)
        if group and (alone or len(group) >= MOST_PIECES or group_size >= size):
            add(group)
            group = []
            group_size = 0
        if alone:
            for piece in divide_file(file_range, source, identity["--json-keys"], size):
                add([piece])
        else:
            group.append(file_range)
            group_size += source.size
    if group:
        add(group)
    return shards
