"""Which files are read, in which order, and as what."""

from pathlib import Path

import pytest

from megatron_core.datasets.prepare.inputs import describe, find_inputs
from megatron_core.errors import DataError


def test_folders_globs_and_names_keep_their_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b/.hidden", "b/.git/x.txt", "b/sub/3.txt", "a.jsonl", "c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([str(tmp_path / "c.jsonl"), str(tmp_path / "b"), str(tmp_path / "*.jsonl")])
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == ["c.jsonl", "b/1.txt", "b/2.txt", "b/sub/3.txt", "a.jsonl", "c.jsonl"]
    assert find_inputs([str(tmp_path / "[b]")]) == [tmp_path / name for name in ("b/1.txt", "b/2.txt", "b/sub/3.txt")]


def test_a_pattern_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file has that name"):
        find_inputs([str(tmp_path / "*.jsonl")])
    with pytest.raises(DataError, match="--input names no file"):
        find_inputs([])


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.jsonl", "jsonl", None),
        ("a.JSON.gz", "jsonl", "gzip"),
        ("a.parquet.zst", "parquet", "zstd"),
        ("a.md", "text", None),
        ("a.gz", "text", "gzip"),
        ("README", "text", None),
        ("v1.2.txt.zst", "text", "zstd"),
    ],
)
def test_suffixes_decide(name: str, kind: str, compression: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"12345")
    source = describe(tmp_path / name)
    assert (source.kind, source.compression, source.size) == (kind, compression, 5)
