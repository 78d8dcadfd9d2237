"""Division of the input into pieces, tasks and parts."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from megatron_core.preprocess.inputs import DamagedFileError, InputFile
from megatron_core.preprocess.readers import content_blocks
from megatron_core.preprocess.settings import Limits, PreprocessSettings
from megatron_core.preprocess.worker import InputFiles, InputRange

# Workers are idle during the last tasks: with 12 tasks each at most 4% of the time. A task costs half a millisecond.
TASKS_PER_WORKER = 12
SMALL_TASK = 1 << 18
MOST_PIECES = 1000


def read_pieces(
    settings: PreprocessSettings,
    sources: Sequence[InputFile],
    limits: Limits,
    folder: Path,
    size: int,
    position: tuple[int, int],
) -> Iterator[InputRange]:
    """Yield the pieces of all files from a position on; this process reads files that can only be read sequentially.

    size: bytes of the ranges into which a plain JSON Lines file is divided.
    """
    for file_range in whole_ranges(len(sources), position):
        yield from divide_range(file_range, sources[file_range.source], settings, limits, folder, size)


def whole_ranges(count: int, position: tuple[int, int]) -> Iterator[InputRange]:
    """Yield the rest of each of `count` files from a position on."""
    first, start = position
    for number in range(first, count):
        yield InputRange(number, start if number == first else 0)


def divide_range(
    file_range: InputRange, source: InputFile, settings: PreprocessSettings, limits: Limits, folder: Path, size: int
) -> Iterator[InputRange]:
    """Yield the pieces of a range of a file, as in `read_pieces`."""
    number = file_range.source
    if can_be_divided(source):
        yield from divide_lines(file_range, source, size)
    elif source.format == "text" and settings.separator is None:
        yield InputRange(number, raw=source.size)
    else:
        start = file_range.start
        try:
            for block in content_blocks(source, settings.json_keys, settings.separator, limits, folder, start):
                yield InputRange(number, start, block.end, block=block)
        except DamagedFileError as error:
            yield InputRange(number, damage=str(error))


def can_be_divided(source: InputFile) -> bool:
    """Whether a worker can begin to read the file at any byte."""
    return source.format == "jsonl" and source.compression is None


def divide_lines(file_range: InputRange, source: InputFile, size: int) -> Iterator[InputRange]:
    """Yield ranges of a plain JSON Lines file that end at multiples of `size`, whatever their start."""
    stop = source.size if file_range.end is None else file_range.end
    for begin in [file_range.start, *range((file_range.start // size + 1) * size, stop, size)]:
        end = (begin // size + 1) * size
        if begin < stop:
            yield InputRange(file_range.source, begin, end if end < stop else file_range.end, raw=min(end, stop))


def group_pieces(pieces: Iterable[InputRange], sources: InputFiles, size: int) -> Iterator[list[InputRange]]:
    """Group pieces into tasks of `size` bytes or slightly more, so that many small files make few tasks."""
    group: list[InputRange] = []
    total = 0
    for piece in pieces:
        group.append(piece)
        end = sources[piece.source].size if piece.end is None else piece.end
        total += piece.block.size if piece.block else end - piece.start
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
        return f"{self.sources[first.source].path}, byte {first.start:,}"

    @property
    def size(self) -> int:
        """Number of bytes of the ranges, on disk."""
        ends = (self.sources[r.source].size if r.end is None else r.end for r in self.ranges)
        return sum(end - r.start for end, r in zip(ends, self.ranges, strict=True))


def plan_parts(
    sources: Sequence[InputFile], identity: Mapping[str, Any], size: int, position: tuple[int, int]
) -> list[InputPart]:
    """Divide the input from a position on into parts of about `size` bytes.

    A plain JSON Lines file that is longer is divided at multiples of `size`; other files are never divided, and small
    ones share a part. So the parts after a border are the same from any earlier border on, and a run that resumes finds
    finished parts. identity: the settings that determine the tokens.
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
    for file_range in whole_ranges(len(sources), position):
        source = sources[file_range.source]
        # The ranges of a divided file are alone in their parts: if it is damaged, all of them are left out.
        alone = can_be_divided(source) and (source.size > size or file_range.start > 0)
        if group and (alone or len(group) >= MOST_PIECES or group_size >= size):
            add(group)
            group = []
            group_size = 0
        if alone:
            for piece in divide_lines(file_range, source, size):
                add([piece])
        else:
            group.append(file_range)
            group_size += source.size
    if group:
        add(group)
    return shards
