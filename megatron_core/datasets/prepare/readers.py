"""One reader for each kind of input, and the texts of any inputs one by one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from megatron_core.datasets.prepare.documents import Batch, Limits
from megatron_core.datasets.prepare.inputs import Source, describe
from megatron_core.datasets.prepare.read_lines import LineReader
from megatron_core.datasets.prepare.read_parquet import ParquetReader
from megatron_core.datasets.prepare.read_text import TextReader
from megatron_core.datasets.prepare.streams import Stream
from megatron_core.errors import DataError

PLACE_WORDS = {"jsonl": "line", "parquet": "row", "text": "document"}
"""What the documents of each kind of file are counted by."""


class Reader(Protocol):
    """Reads ranges of one file, each range later than the one before.

    ended: whether the last range reached the end of the file. raw: bytes of the file read up to now.
    """

    ended: bool
    raw: int

    def read(self, start: int, stop: int | None) -> Iterator[Batch]:
        """The documents that start in the range."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def open_reader(source: Source, keys: Sequence[str], separator: str | None, limits: Limits, folder: Path) -> Reader:
    """The reader for the file's kind; `folder` takes what has to be unpacked first."""
    if source.kind == "parquet":
        return ParquetReader(source, keys, limits, folder)
    stream = Stream(source)
    if source.kind == "text":
        return TextReader(stream, len(keys), separator, limits)
    return LineReader(stream, keys, limits)


def read_texts(
    paths: Sequence[Path], keys: Sequence[str], separator: str | None = None
) -> Iterator[tuple[list[str], int]]:
    """The texts of all documents of the files, some at a time, and the bytes of the files that were read for them.

    DataError: names file and place of the first broken document.
    """
    with TemporaryDirectory() as folder:
        for path in paths:
            source = describe(path)
            reader = open_reader(source, keys, separator, Limits(), Path(folder))
            lines, raw = 0, 0
            for batch in reader.read(0, None):
                for place, sentence in batch.broken:
                    raise DataError(f"{path}, {PLACE_WORDS[source.kind]} {lines + place} {sentence}")
                yield [text for texts in batch.texts for text in texts], reader.raw - raw
                lines, raw = lines + batch.lines, reader.raw
            reader.close()
