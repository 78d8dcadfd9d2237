"""Paths in object storage, with fsspec's storage in memory, and errors of services in the project's words."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError
from megatron_core.locations import (
    CACHE_VARIABLE,
    in_storage,
    local_copy,
    location,
    read_part,
    run_folder,
)
from megatron_core.storage.paths import StoragePath, _file_system


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoragePath:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path = in_storage(location(f"memory://bucket/{uuid.uuid4().hex}/"))
    assert isinstance(path, StoragePath)
    return path


def test_paths_of_this_machine_stay_paths() -> None:
    for text, path in (("a/b", "a/b"), ("file:///a/b%20c", "/a/b c"), ("C:/a", "C:/a"), ("s3:/a", "s3:/a")):
        assert location(text) == Path(path) and in_storage(location(text)) is None


def test_objects_and_folders(folder: StoragePath) -> None:
    file = folder / "run" / "iter_0000001" / "manifest.json"
    assert not file.exists() and not folder.exists()
    file.write_text("text")
    (folder / "run" / ".iter_0000002.incomplete" / "a.report").write_bytes(b"0123456789")
    assert file.is_file() and file.exists() and folder.is_dir() and not folder.is_file() and not file.is_dir()
    assert (file.name, file.parent.name, file.with_suffix(".new").name) == (
        "manifest.json",
        "iter_0000001",
        "manifest.new",
    )
    assert file.read_text() == "text" and file.stat().st_size == 4
    assert {path.name for path in (folder / "run").iterdir()} == {"iter_0000001", ".iter_0000002.incomplete"}
    assert list((folder / "run").glob("iter_*/manifest.json")) == [file]
    assert [path.name for path in (folder / "run").glob(".iter_*")] == [".iter_0000002.incomplete"]
    assert read_part(location(f"{folder}/run/.iter_0000002.incomplete/a.report"), 8, 5) == b"89"
    file.unlink()
    file.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        file.unlink()
    folder.remove_tree()
    assert not folder.exists()


def test_a_local_copy_is_made_once_for_each_version(folder: StoragePath, monkeypatch: pytest.MonkeyPatch) -> None:
    path = location(f"{folder}/corpus.idx")
    path.write_bytes(b"first")
    assert local_copy(path).read_bytes() == b"first"
    reads: list[int] = []
    read = StoragePath.read_range
    monkeypatch.setattr(StoragePath, "read_range", lambda *given: reads.append(given[1]) or read(*given))
    assert local_copy(path).read_bytes() == b"first" and reads == []
    path.write_bytes(b"second")
    assert local_copy(path).read_bytes() == b"second" and reads == [0]
    assert sorted(each.name for each in local_copy(location(str(folder))).iterdir()) == ["corpus.idx"]
    assert run_folder(f"{folder}/run") == run_folder(f"{folder}/run/") != run_folder(f"{folder}/other")


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (
            NoCredentialsError("Unable to locate credentials\nmore"),
            OSError,
            "NoCredentialsError: Unable to locate credentials",
        ),
        (ConnectionError("refused"), OSError, "check the network, the endpoint and the credentials"),
        (OSError(22, "Bad Request"), OSError, "Bad Request, as S3 answers to expired credentials"),
        (PermissionError("Forbidden"), PermissionError, r"access was denied \(Forbidden\); check the credentials"),
        (FileNotFoundError("The specified bucket does not exist"), FileNotFoundError, "bucket does not exist"),
    ],
)
def test_errors_of_services(
    folder: StoragePath, raised: Exception, kind: type, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    for name in ("cat_file", "pipe_file", "info", "exists", "isfile", "isdir", "ls", "glob", "rm_file", "open"):
        monkeypatch.setattr(folder._files.files, name, fail, raising=True)
    actions = [
        folder.read_bytes,
        folder.exists,
        folder.is_file,
        folder.is_dir,
        folder.stat,
        folder.writer,
        folder.unlink,
    ]
    actions += [lambda: list(folder.iterdir()), lambda: list(folder.glob("*")), lambda: folder.write_bytes(b"a")]
    for action in actions:
        if action == folder.is_file and kind is FileNotFoundError:
            assert not action()
            continue
        with pytest.raises(kind, match=said) as found:
            action()
        assert found.value.filename == str(folder) and "\n" not in str(found.value)
    folder.remove_tree()


@pytest.mark.parametrize("special", ["run[1]", "run*", "run?"])
def test_names_with_characters_of_patterns(folder: StoragePath, special: str) -> None:
    """They are not patterns: other folders that match are neither listed nor deleted."""
    own, others = folder / special, [folder / name for name in ("run1", "runs", "run")]
    for each in (own, *others):
        (each / "part.incomplete" / "a.report").write_text("text")
    assert list(own.glob("*/*.report")) == [own / "part.incomplete" / "a.report"]
    (own / "part.incomplete").remove_tree()
    assert not own.exists() and all((each / "part.incomplete" / "a.report").is_file() for each in others)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ImportError("No module named 's3fs'")

    monkeypatch.setattr("fsspec.filesystem", absent)
    _file_system.cache_clear()
    with pytest.raises(ConfigError, match=r"s3:// needs another package .*; pip install s3fs$"):
        location("s3://bucket/a")
    _file_system.cache_clear()


def test_schemes_without_support() -> None:
    with pytest.raises(ConfigError, match=r"s3x:// is not supported; give a folder, or a URL of s3://, gs://"):
        location("s3x://bucket/a")
