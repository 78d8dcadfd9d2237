"""Read the documents of input files in blocks: JSON Lines, plain text, Parquet."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import BytesIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from megatron_core.preprocess.inputs import BUFFER_BYTES, DamagedFileError, InputFile, Stream, describe_input, expanded
from megatron_core.preprocess.settings import Limits

DOCUMENT_WORDS = {"jsonl": "line", "parquet": "row", "text": "document"}
"""Unit of the position of a document, by kind of file."""

BINARY = {
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"PK\x03\x04": "a zip archive",
}
"""First bytes of files in unsupported formats."""
TEXT_COLUMN = re.compile(
    r"(large_)?(string|binary)|(string|binary)_view|fixed_size_binary\[\d+\]|dictionary<values=(large_)?(string|binary),.*"
)
"""Pattern of the types of columns with texts; lists and structs of texts are not among them."""
MOST_ROWS, MOST_EMPTY_ROWS = 4096, 1 << 20
ROWS_PER_BYTE = 16
"""A Parquet file with more rows than MOST_EMPTY_ROWS and than ROWS_PER_BYTE x its bytes is refused, because each row
of text needs at least one byte."""


@dataclass
class Batch:
    """Successive documents of one file.

    lines: number of lines read, including lines without a document. numbers: line (row) in the batch of each document,
    from 1. texts: for each key the texts of the documents; empty without documents. broken: line and fault of each
    skipped document.
    """

    lines: int = 0
    size: int = 0
    numbers: list[int] = field(default_factory=list)
    texts: Sequence[Sequence[str]] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class ContentBlock:
    """A part of a file: unparsed whole lines of JSON, or documents.

    end: start of the next block, in bytes of content (Parquet: rows). raw: bytes of the file read up to its end.
    """

    content: bytes | Batch
    end: int
    raw: int

    @property
    def size(self) -> int:
        """Number of bytes of content."""
        return self.content.size if isinstance(self.content, Batch) else len(self.content)

    def batch(self, keys: tuple[str, ...]) -> Batch:
        """Return the documents, parsed if necessary."""
        batch = self.content if isinstance(self.content, Batch) else parse_lines(self.content, keys)
        return batch if batch.texts else replace(batch, texts=[()] * len(keys))


def content_blocks(
    source: InputFile,
    keys: Sequence[str],
    separator: str | None,
    limits: Limits,
    folder: Path,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[ContentBlock]:
    """Yield the documents of a file that begin in [start, stop), in bytes of content; for Parquet in rows.

    folder: for the decompressed copy of a compressed Parquet file. DamagedFileError: a file cannot be read to its end.
    """
    if source.format == "parquet":
        yield from parquet_blocks(source, keys, limits, folder, start, stop)
        return
    with Stream(source, stop) as stream:
        if source.format == "jsonl":
            yield from line_blocks(stream, start, stop, limits, source.path)
        else:
            yield from text_blocks(stream, len(keys), separator, start, limits)


def read_texts(paths: Sequence[Path], keys: Sequence[str]) -> Iterator[tuple[list[str], int, list[str]]]:
    """Yield for batches of documents their texts, the number of bytes read from the files, and a sentence with file and
    line for each broken document, which is skipped.

    DamagedFileError: a file cannot be read to its end.
    """
    with TemporaryDirectory() as folder:
        for path in paths:
            source = describe_input(path)
            lines = raw = 0
            for block in content_blocks(source, keys, None, Limits(), Path(folder)):
                batch = block.batch(tuple(keys))
                word = DOCUMENT_WORDS[source.format]
                broken = [f"{path}, {word} {lines + number} {fault}" for number, fault in batch.broken]
                yield list(chain.from_iterable(batch.texts)), block.raw - raw, broken
                lines += batch.lines
                raw = block.raw


# JSON Lines


def line_blocks(stream: Stream, start: int, stop: int | None, limits: Limits, path: str) -> Iterator[ContentBlock]:
    """Yield blocks of the lines that begin in [start, stop); a line longer than the limit is a broken document.

    DamagedFileError: the file is one JSON array.
    """
    most = limits.document_bytes
    if start:
        stream.skip_to(start - 1)
        _skip_line(stream, stop)  # only up to stop: else every range within a line of 1 GB would read its rest
    while stop is None or stream.position < stop:
        first = stream.position == 0
        size = limits.batch_bytes if stop is None else min(limits.batch_bytes, stop - stream.position)
        if not (data := stream.read(size)):
            return
        tail = b"" if data.endswith(b"\n") else stream.readline(most + 2)
        begin = data.rfind(b"\n") + 1
        # The newline is not counted, because the last line of a file may have none.
        long = len((data[begin:] + tail).removesuffix(b"\n")) > most
        lines = data[:begin] if long else data + tail
        if first and is_array(lines):
            raise DamagedFileError(
                f"{path} is a JSON array, expected one object per line (JSON Lines); convert it, for example with "
                f"jq -c '.[]' {path} > {Path(path).stem}_lines.jsonl"
            )
        if lines:
            yield ContentBlock(lines, stream.position, stream.raw)
        if long:
            if not tail.endswith(b"\n"):
                _skip_line(stream)
            yield ContentBlock(Batch(lines=1, broken=[(1, too_long(limits))]), stream.position, stream.raw)


def _skip_line(stream: Stream, stop: int | None = None) -> None:
    while stop is None or stream.position < stop:
        data = stream.readline(BUFFER_BYTES)
        if not data or data.endswith(b"\n"):
            return


def too_long(limits: Limits) -> str:
    """Return the fault of a document longer than the limit."""
    return f"has more than {limits.document_bytes:,} bytes; split it into several documents"


def is_array(data: bytes) -> bool:
    """Whether a file that begins with these lines is an array of objects instead of JSON Lines."""
    line = data.removeprefix(b"\xef\xbb\xbf").lstrip().split(b"\n", 1)[0]
    if not line.startswith(b"["):
        return False
    try:
        return any(isinstance(item, dict) for item in json.loads(line))
    except (ValueError, RecursionError):
        return True


def parse_lines(data: bytes, keys: tuple[str, ...]) -> Batch:
    """Parse lines of JSON to the texts under the keys; blank lines are skipped."""
    lines = BytesIO(data).readlines()  # takes a third of the time of bytes.split
    numbers, documents = [], []
    broken = []
    for number, line in enumerate(lines, 1):
        if line.isspace():  # takes a hundredth of the time of parsing the line
            continue
        try:
            texts = texts_of(line, keys)
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            broken.append((number, fault(line, keys, error)))
            continue
        numbers.append(number)
        documents.append(texts)
    return Batch(len(lines), len(data), numbers, list(zip(*documents, strict=True)), broken)


def texts_of(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return the texts under the keys of a line of JSON; null is an empty text. Errors: as ``parse_lines`` catches."""
    lenient = False
    try:
        document = orjson.loads(line)
    except ValueError:
        # json is slower and accepts more: a byte-order mark, NaN, nesting of any depth, halves of surrogate pairs.
        document, lenient = json.loads(line), True
    texts = ["" if (text := document[key]) is None else text for key in keys]
    if not all(type(text) is str for text in texts):
        raise TypeError
    if lenient:
        "".join(texts).encode("utf-8")
    return texts


def fault(line: bytes, keys: Sequence[str], error: Exception) -> str:
    """Describe the fault of a line without a document, as the end of a sentence that begins with file and line."""
    if line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
        return (
            'begins a JSON array, expected an object such as {"text": ...} on each line; write one object per line, as '
            "jq -c '.[]' array.json > lines.jsonl does"
        )
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return f"is not JSON ({error}); correct or remove the line"
    if not isinstance(document, dict):
        return f'is {_kind(document)}, expected an object such as {{"text": ...}} on each line'
    for key in keys:
        if key not in document:
            names = ", ".join(sorted(document)[:10]) or "none"
            return f"has no key {key!r}; its keys: {names}; choose with --json-keys"
    for key in keys:
        if not isinstance(document[key], str | None):
            return f"has {_kind(document[key])} under {key!r}, expected a string"
    return "has half of a surrogate pair in its text, which is not valid Unicode; correct or remove the line"


def _kind(value: Any) -> str:
    """Name of a value's type in JSON."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# Plain text


def text_blocks(stream: Stream, keys: int, separator: str | None, start: int, limits: Limits) -> Iterator[ContentBlock]:
    """Yield blocks of documents separated by `separator`; without a separator the file is one document.

    An empty text after the last separator is not a document. A byte-order mark at the beginning of the file is removed.
    """
    stream.skip_to(start)
    texts: list[str] = []
    batch = Batch()
    end = 0
    first = start == 0
    for end, data in split_documents(stream, separator.encode("utf-8") if separator else None, limits.document_bytes):
        batch.lines += 1
        try:
            if data is None:
                batch.broken.append((batch.lines, too_long(limits)))
            else:
                texts.append(data.decode("utf-8-sig" if first else "utf-8"))
                batch.numbers.append(batch.lines)
                batch.size += len(data)
        except UnicodeDecodeError as error:
            name = next((name for magic, name in BINARY.items() if data and data.startswith(magic)), None)
            remedy = f"it is {name}: write it as Parquet, .gz or .zst" if name and first else "correct or remove it"
            batch.broken.append((batch.lines, f"is not UTF-8 ({error}); {remedy}"))
        first = False
        if batch.size >= limits.batch_bytes:
            yield ContentBlock(replace(batch, texts=[texts] * keys), end, stream.raw)
            texts = []
            batch = Batch()
    if batch.lines:
        yield ContentBlock(replace(batch, texts=[texts] * keys), end, stream.raw)


def split_documents(stream: Stream, separator: bytes | None, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the start of the next document and the bytes of each document; None if it has more than `most` bytes."""
    if separator is None:
        data = stream.read(most + 1)
        yield stream.position, (data if len(data) <= most else None)
        return
    # A bytearray grows in place. Bytes are copied at each read: 80 MB without a separator took 27 s instead of 0.2.
    buffered = bytearray()
    start, begin, long = stream.position, 0, False
    while data := stream.read(1 << 16):
        # A separator can span two reads.
        searched = max(begin, len(buffered) - len(separator) + 1)
        buffered += data
        while (end := buffered.find(separator, searched)) >= 0:
            start += end - begin + len(separator)
            yield start, (None if long or end - begin > most else bytes(buffered[begin:end]))
            begin = searched = end + len(separator)
            long = False
        del buffered[:begin]
        begin = 0
        if len(buffered) > most:
            # From here on only the length is needed, for the position of the next document.
            dropped = len(buffered) - len(separator) + 1
            start += dropped
            long = True
            del buffered[:dropped]
    if buffered or long:
        yield start + len(buffered), (None if long else bytes(buffered))


# Parquet


def parquet_blocks(
    source: InputFile, keys: Sequence[str], limits: Limits, folder: Path, start: int = 0, stop: int | None = None
) -> Iterator[ContentBlock]:
    """Yield blocks of the rows in [start, stop); a null is an empty text, as in JSON."""
    import pyarrow.lib  # as in open_parquet

    with open_parquet(source, keys, folder) as file:
        row = 0
        stop = file.metadata.num_rows if stop is None else stop
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            if row >= stop:
                return
            if row + about.num_rows <= start:
                row += about.num_rows
                continue
            rows = max(1, min(MOST_ROWS, limits.batch_bytes * about.num_rows // max(1, about.total_byte_size)))
            try:
                for table in file.iter_batches(rows, row_groups=[group], columns=list(keys), use_threads=False):
                    length, skipped = min(table.num_rows, stop - row), max(0, start - row)
                    row += length
                    if skipped < length:
                        batch = rows_of([table.column(key).slice(skipped, length - skipped) for key in keys], limits)
                        yield ContentBlock(batch, row, source.size * row // file.metadata.num_rows)
            except (pyarrow.lib.ArrowException, OSError) as error:
                raise DamagedFileError(
                    f"{source.path} is damaged in row group {group}, after row {row:,} ({error}); create it again"
                ) from error


def open_parquet(source: InputFile, keys: Sequence[str], folder: Path) -> Any:
    """Open a Parquet file, and check its columns and its number of rows. Errors: DamagedFileError.

    folder: for the decompressed copy of a compressed file.
    """
    # Imported here, because the import takes 0.1 s and is needed only for Parquet files.
    import pyarrow.lib
    import pyarrow.parquet

    try:
        # Without these two settings pyarrow holds whole row groups in memory.
        footer = _footer(source) if source.compression is None else None
        path = expanded(source, folder)
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, metadata=footer)
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise DamagedFileError(
            f"{source.path} is truncated, or not a Parquet file ({error}); copy or create it again"
        ) from error
    _check_columns(file.schema_arrow, keys, source.path)
    if file.metadata.num_rows > max(MOST_EMPTY_ROWS, ROWS_PER_BYTE * source.size):
        raise DamagedFileError(
            f"{source.path} has {file.metadata.num_rows:,} rows in {source.size:,} bytes, as a decompression bomb "
            "does; remove it, or write its distinct rows to a new file"
        )
    return file


@lru_cache(1)  # each task reads a part of a file
def _footer(source: InputFile) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(expanded(source, Path()))


def _check_columns(schema: Any, keys: Sequence[str], path: str) -> None:
    for key in keys:
        if key not in schema.names:
            names = ", ".join(schema.names[:10]) or "none"
            raise DamagedFileError(f"{path} has no column {key!r}; its columns: {names}; choose with --json-keys")
        dtype = str(schema.field(key).type)
        if not TEXT_COLUMN.fullmatch(dtype):
            raise DamagedFileError(f"{path} has {dtype} in column {key!r}, expected strings; choose with --json-keys")


def rows_of(columns: Sequence[Any], limits: Limits) -> Batch:
    """Return the documents of some rows."""
    import pyarrow

    values = [[value or b"" for value in column.cast(pyarrow.large_binary()).to_pylist()] for column in columns]
    numbers, documents = [], []
    broken = []
    for number, row in enumerate(zip(*values, strict=True), 1):
        try:
            if max(map(len, row)) > limits.document_bytes:
                broken.append((number, too_long(limits)))
                continue
            documents.append([value.decode("utf-8") for value in row])
            numbers.append(number)
        except UnicodeDecodeError as error:
            broken.append((number, f"is not UTF-8 ({error}); correct or remove it"))
    size = sum(map(len, chain.from_iterable(values)))
    return Batch(len(values[0]), size, numbers, list(zip(*documents, strict=True)), broken)
