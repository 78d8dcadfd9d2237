"""Parquet columns are texts; nulls are empty documents."""

import gzip
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_core.datasets.aside import DiskFullError
from megatron_core.datasets.prepare.documents import Limits
from megatron_core.datasets.prepare.inputs import describe
from megatron_core.datasets.prepare.read_parquet import ParquetReader
from megatron_core.errors import DataError
from tests.datasets.prepare.corpora import file_size_limit

ROWS = ["a", None, "", "Gr\u00fc\u00dfe", "x" * 100] * 20


def write(path: Path, column: pyarrow.Array) -> Path:
    """A file of row groups of 7 rows."""
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(column)), "text": column}), path, row_group_size=7)
    return path


def read(path: Path, limits: Limits | None = None) -> list[tuple[int, str | None]]:
    """Row and text of each document, None for a broken one."""
    reader, found, before, group = ParquetReader(describe(path), ["text"], limits or Limits(), path.parent), [], 0, 0
    while not reader.ended:
        for batch in reader.read(group, group + 1):
            found += [(before + place, text) for place, text in zip(batch.places, batch.texts[0], strict=True)]
            found += [(before + place, None) for place, _ in batch.broken]
            before += batch.lines
        group += 1
    return sorted(found, key=lambda item: item[0])


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_rows_become_texts(kind: pyarrow.DataType, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pyarrow.array(ROWS, kind))
    expected = [(n, row or "") for n, row in enumerate(ROWS, 1)]
    assert read(path) == read(path, Limits(batch_bytes=20)) == expected
    packed = tmp_path / "a.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed) == expected


def test_the_unpacked_copy_of_an_older_file_is_not_read(tmp_path: Path) -> None:
    for rows in (["old"] * 3, ["new"] * 4):
        path = write(tmp_path / "plain.parquet", pyarrow.array(rows))
        packed = tmp_path / "a.parquet.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert read(packed) == list(enumerate(rows, 1))


def test_a_disk_without_room_for_the_unpacked_copy_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "plain.parquet", pyarrow.array(["a"] * 3))
    packed = tmp_path / "a.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with file_size_limit(100), pytest.raises(DiskFullError, match=r"\.partial: the file may not become larger here"):
        read(packed)
    assert read(packed) == [(1, "a"), (2, "a"), (3, "a")]


def test_broken_rows_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pyarrow.array([b"a", b"\xff", b"b" * 20], pyarrow.binary()))
    assert read(path, Limits(document_bytes=10)) == [(1, "a"), (2, None), (3, None)]


def test_faults_of_a_file_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pyarrow.array(["a"] * 20))
    with pytest.raises(DataError, match=r"a\.parquet has no column 'body'; its columns: n, text; see --json-keys"):
        ParquetReader(describe(path), ["body"], Limits(), tmp_path)
    with pytest.raises(DataError, match=r"a\.parquet has int64 in column 'n', expected strings"):
        ParquetReader(describe(path), ["n"], Limits(), tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is cut off, or no Parquet file"):
        ParquetReader(describe(path), ["text"], Limits(), tmp_path)
