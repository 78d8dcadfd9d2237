"""Selection, order and kinds of input files."""

import os
from pathlib import Path

import pytest

from megatron_core.errors import DataError
from megatron_core.preprocess.inputs import Stream, describe, find_inputs


def test_folders_globs_and_names_keep_their_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b/.hidden", "b/.git/x.txt", "b/sub/3.txt", "a.jsonl", "c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_inputs([str(tmp_path / "c.jsonl"), str(tmp_path / "b"), str(tmp_path / "*.jsonl")])
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == ["c.jsonl", "b/1.txt", "b/2.txt", "b/sub/3.txt", "a.jsonl", "c.jsonl"]
    assert find_inputs([str(tmp_path / "[b]")]) == [tmp_path / name for name in ("b/1.txt", "b/2.txt", "b/sub/3.txt")]


def test_token_files_of_a_folder_are_no_text(tmp_path: Path) -> None:
    for name in ("a.txt", "other_text_document.bin", "other_text_document.idx", "b.bin.partial"):
        (tmp_path / name).write_text("x")
    assert find_inputs([str(tmp_path)]) == find_inputs([str(tmp_path / "*")]) == [tmp_path / "a.txt"]
    # A file named explicitly is read.
    assert find_inputs([str(tmp_path / "other_text_document.bin")]) == [tmp_path / "other_text_document.bin"]


def test_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "dead.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"--input .*dead\.jsonl cannot be read \(No such file or directory\); rep"):
        describe(*find_inputs([str(tmp_path)]))


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
    assert (source.format, source.compression, source.size) == (kind, compression, 5)


def test_linked_folders_are_read_once_and_never_for_ever(tmp_path: Path) -> None:
    for name in ("in/a.txt", "elsewhere/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "in")
    found = [str(path.relative_to(tmp_path)) for path in find_inputs([str(tmp_path / "in")])]
    assert found == ["in/a.txt", "in/link/b.txt"]


def test_what_the_run_writes_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.jsonl", "out.bin", "out.binary", "out.work/lock", "out.works/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    written = [Path("out.bin"), Path("out.work")]
    expected = ["a.jsonl", "out.binary", "out.works/b.txt"]
    for pattern in (".", str(tmp_path), "**"):
        found = {os.path.relpath(path) for path in find_inputs([pattern], written)}
        assert sorted(found) == expected
    assert find_inputs(["out.bin"], written) == [Path("out.bin")]
    with pytest.raises(DataError, match=r"--input out\.b\?n: no file has that name"):
        find_inputs(["out.b?n"], written)


def test_a_pipe_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"--input .*a\.jsonl is a pipe or a device.*write its content"):
        describe(tmp_path / "a.jsonl")


@pytest.mark.parametrize("content", ["", "x" * 500, "x" * 2000])
def test_a_file_that_changes_while_it_is_read_is_an_error(content: str, tmp_path: Path) -> None:
    """A truncated file would otherwise silently give only a part of its documents."""
    path = tmp_path / "a.jsonl"
    path.write_text("y" * 1000)
    with Stream(describe(path)) as stream:
        assert stream.read(100) == b"y" * 100
        path.write_text(content)
        with pytest.raises(DataError, match=r"a\.jsonl changed while it was read, from 1,000 to"):
            while stream.read(4000):
                pass
