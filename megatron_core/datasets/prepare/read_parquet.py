"""Parquet: the rows of a file's row groups, its columns being the keys."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_core.datasets.aside import naming_the_place, put_on_disk
from megatron_core.datasets.prepare.documents import Batch, Limits
from megatron_core.datasets.prepare.inputs import Source
from megatron_core.datasets.prepare.read_lines import too_long
from megatron_core.datasets.prepare.streams import BUFFER_BYTES, Stream
from megatron_core.errors import DataError

MOST_ROWS = 4096


class ParquetReader:
    """Reads row groups of one Parquet file; a null is an empty document, as if the row had an empty text."""

    def __init__(self, source: Source, keys: Sequence[str], limits: Limits, folder: Path) -> None:
        # Imported here: it takes 0.1 s, which no other kind of input should pay.
        import pyarrow.lib
        import pyarrow.parquet

        self._source = source
        self._keys = list(keys)
        self._limits = limits
        self._next = 0
        try:
            # Without these two settings the reader holds whole row groups.
            self._file = pyarrow.parquet.ParquetFile(
                str(unpacked(source, folder)), pre_buffer=False, buffer_size=1 << 20
            )
        except (pyarrow.lib.ArrowException, OSError) as error:
            raise DataError(f"{source.path} is cut off, or no Parquet file ({error}); copy or make it again") from error
        self._faults = pyarrow.lib.ArrowException
        self._check_columns()

    def read(self, start: int, stop: int | None) -> Iterator[Batch]:
        """The documents of the row groups [start, stop), in batches."""
        groups = self._file.num_row_groups
        for group in range(start, groups if stop is None else min(stop, groups)):
            yield from self._batches(group)
            self._next = group + 1

    @property
    def ended(self) -> bool:
        """Whether no row group is left."""
        return self._next >= self._file.num_row_groups

    @property
    def raw(self) -> int:
        """Bytes of the file that were read up to now, about."""
        return self._source.size * self._next // max(1, self._file.num_row_groups)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check_columns(self) -> None:
        names = self._file.schema_arrow.names
        for key in self._keys:
            if key not in names:
                there = ", ".join(names[:10]) or "none"
                raise DataError(f"{self._source.path} has no column {key!r}; its columns: {there}; see --json-keys")
            kind = str(self._file.schema_arrow.field(key).type)
            if "string" not in kind and "binary" not in kind:
                raise DataError(f"{self._source.path} has {kind} in column {key!r}, expected strings; see --json-keys")

    def _batches(self, group: int) -> Iterator[Batch]:
        about = self._file.metadata.row_group(group)
        rows = max(1, min(MOST_ROWS, self._limits.batch_bytes * about.num_rows // max(1, about.total_byte_size)))
        tables = self._file.iter_batches(rows, row_groups=[group], columns=self._keys, use_threads=False)
        try:
            for table in tables:
                yield texts_of([table.column(key) for key in self._keys], self._limits)
        except (self._faults, OSError) as error:
            raise DataError(f"{self._source.path}, row group {group} is damaged ({error}); make it again") from error


def texts_of(columns: Sequence[Any], limits: Limits) -> Batch:
    """The documents of some rows."""
    import pyarrow

    values = [column.cast(pyarrow.large_binary()).to_pylist() for column in columns]
    places, found, broken = [], [], []
    for place, row in enumerate(zip(*values, strict=True), 1):
        try:
            if max(len(value or b"") for value in row) > limits.document_bytes:
                broken.append((place, too_long(limits)))
                continue
            found.append([(value or b"").decode("utf-8") for value in row])
            places.append(place)
        except UnicodeDecodeError as error:
            broken.append((place, f"is no UTF-8 ({error}); mend or remove it"))
    texts = list(zip(*found, strict=True)) if found else [()] * len(columns)
    size = sum(len(value or b"") for column in values for value in column)
    return Batch(len(values[0]), size, places, texts, broken)


def unpacked(source: Source, folder: Path) -> Path:
    """The file itself, or its unpacked copy in the work folder: Parquet is read from its end."""
    if source.compression is None:
        return Path(source.path)
    # With its size and date: a run that was killed may have left the copy of an older file.
    identity = f"{source.path} {source.size} {source.mtime_ns}"
    name = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
    path = folder / f"{name}.unpacked"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}.partial")
        stream = Stream(source)
        with partial.open("wb") as file:
            while data := stream.read(BUFFER_BYTES):
                with naming_the_place(file):
                    file.write(data)
            put_on_disk(file)
        stream.close()
        os.replace(partial, path)
    return path
