"""Collection of a folder's text as JSON Lines."""

import json
from pathlib import Path

import pytest

from megatron_core.commands.collect_corpus import CorpusFlags, collect_files, main
from megatron_core.errors import DataError


def collected(output: Path) -> dict[str, str]:
    """Path and text of each document, in the file's order."""
    lines = output.read_text(encoding="utf-8").splitlines()
    return {document["path"]: document["text"] for document in map(json.loads, lines)}


def fill(folder: Path, files: dict[str, bytes]) -> None:
    """Files below a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_what_a_folder_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "source", tmp_path / "new" / "corpus.jsonl"
    fill(
        source,
        {
            "b.txt": "zweite Größe\n".encode(),
            "a.md": b"first\n",
            "sub/code.py": b"x = 1\n",
            "sub/picture.png": b"\x89PNG",
            "latin.txt": b"\xe4",
            "blank.txt": b" \n",
            ".git/hidden.txt": b"no",
            "__pycache__/c.py": b"no",
            "node_modules/m.md": b"no",
        },
    )
    collect_files(CorpusFlags(folder=str(source), output=str(output)))
    assert list(collected(output).items()) == [
        ("a.md", "first\n"),
        ("b.txt", "zweite Größe\n"),
        ("sub/code.py", "x = 1\n"),
    ]
    printed = capsys.readouterr()
    assert "skipped 1 files that are not UTF-8: latin.txt" in printed.err
    assert "3 documents" in printed.out


def test_patterns(tmp_path: Path) -> None:
    # More than a write buffer, so that the incomplete output would be read if it were an input.
    fill(tmp_path, {"a.rst": b"a" * 100_000, "b.txt": b"b", "c.tex": b"c"})
    output = tmp_path / "corpus.jsonl"
    collect_files(CorpusFlags(folder=str(tmp_path), pattern=("*.rst", "*.tex"), output=str(output)))
    assert list(collected(output)) == ["a.rst", "c.tex"]
    collect_files(CorpusFlags(folder=str(tmp_path), pattern=("*",), output=str(output)))
    assert list(collected(output)) == ["a.rst", "b.txt", "c.tex"]


def test_standard_library(tmp_path: Path) -> None:
    output = tmp_path / "corpus.jsonl"
    collect_files(CorpusFlags(output=str(output)))
    names = collected(output)
    assert output.stat().st_size > 8e6
    assert "json/decoder.py" in names
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)


def test_a_folder_without_text(tmp_path: Path) -> None:
    source = tmp_path / "source"
    fill(source, {"a.png": b"x"})
    output = tmp_path / "corpus.jsonl"
    with pytest.raises(DataError, match=r"--folder .*source has no text in files named \*\.txt \*\.md \*\.py"):
        collect_files(CorpusFlags(folder=str(source), output=str(output)))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_error_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = str(tmp_path / "absent")
    monkeypatch.setattr("sys.argv", ["collect_corpus.py", "--folder", absent, "--output", absent])
    with pytest.raises(DataError, match=r"--folder .*absent is not a folder"):
        main()
