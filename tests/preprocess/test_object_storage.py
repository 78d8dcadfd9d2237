"""Input in object storage gives the bytes of the same files on a disk, with every engine."""

import gzip
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError, DataError
from megatron_core.locations import location
from megatron_core.preprocess import PreprocessSettings, preprocess
from megatron_core.preprocess.inputs import ObjectFile, UnreachableFileError, describe_input, find_inputs
from megatron_core.storage.paths import StoragePath
from tests.preprocess.corpora import SMALL, outcome, settings
from tests.preprocess.test_parts import corpus, in_partitions
from tests.storage.server import BUCKET, s3_server

REMOTE_SCHEMES = ("memory", "s3")


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    """A local S3 server for the clients of this process."""
    for package in ("s3fs", "moto.server"):
        pytest.importorskip(package, reason=f"{package} is not installed (make install-test)")
    with s3_server() as (_, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that a corpus of some kilobytes has many."""
    monkeypatch.setattr(PreprocessSettings, "part_bytes", property(lambda self: 2000))


def uploaded(folder: Path, scheme: str = "memory") -> str:
    """URL of a copy of all files below a folder."""
    url = f"{scheme}://{BUCKET}/{uuid.uuid4().hex}"
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            location(f"{url}/{path.relative_to(folder)}").write_bytes(path.read_bytes())
    return url


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder with files of every format, some of them with two equal names."""
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    corpus(folder)
    shutil.copy(folder / "a.jsonl", folder / "b" / "a.jsonl")
    (folder / ".hidden.jsonl").write_text("{")
    return folder


def both(tmp_path: Path, local: Path, url: str, pattern: str, **changes: object) -> tuple[dict, dict]:
    """The outcomes for files and for objects; the list of problems with equal names."""
    on_disk = outcome(tmp_path, input=(f"{local}{pattern}",), **changes)
    remote = outcome(tmp_path, input=(f"{url}{pattern}",), **changes)
    if "_problems.txt" in remote:
        remote["_problems.txt"] = remote["_problems.txt"].replace(url.encode(), str(local).encode())
    return on_disk, remote


@pytest.mark.parametrize("scheme", REMOTE_SCHEMES)
def test_the_workers_of_a_machine(scheme: str, tmp_path: Path, local: Path, request: pytest.FixtureRequest) -> None:
    if scheme == "s3":
        request.getfixturevalue("server")
    url = uploaded(local, scheme)
    on_disk, remote = both(tmp_path, local, url, "", append_eod=True, document_separator="y")
    assert remote == on_disk and len(remote["_text_document.bin"]) > 10_000
    assert f"{local}/b/a.jsonl, line 145 is not JSON".encode() in remote["_problems.txt"]


@pytest.mark.usefixtures("small_parts")
def test_partitions(tmp_path: Path, local: Path) -> None:
    expected = outcome(tmp_path, input=(f"{local}/*.jsonl", f"{local}/e.*"))
    url = uploaded(local)
    parts = in_partitions(tmp_path, 3, input=(f"{url}/*.jsonl", f"{url}/e.*"))
    assert parts.pop("_problems.txt") == expected.pop("_problems.txt").replace(str(local).encode(), url.encode())
    assert parts == expected


@pytest.mark.parametrize("pattern", ["", "/*", "/[ab]*", "/b", "/b/a.jsonl", "/*.jsonl", "/?.jsonl.*", "/**/*.jsonl"])
def test_the_same_files_in_the_same_order(pattern: str, local: Path) -> None:
    (local / "[x]").mkdir()
    (local / "[x]" / "1.txt").write_text("one")
    url = uploaded(local)
    expected = [str(path).removeprefix(str(local)) for path in find_inputs([f"{local}{pattern}"])]
    assert [str(path).removeprefix(url) for path in find_inputs([f"{url}{pattern}"])] == expected
    assert [str(path) for path in find_inputs([f"{url}/[x]"])] == [f"{url}/[x]/1.txt"]


def test_file_urls_are_paths(local: Path) -> None:
    assert find_inputs([f"file://{local}/?.jsonl"]) == find_inputs([f"{local}/?.jsonl"])


def test_requests_of_a_range_end_with_it(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (local / "long.jsonl").write_bytes(b"x" * 1_000_000)
    source = describe_input(location(f"{uploaded(local)}/long.jsonl"))
    asked: list[tuple[int, int]] = []
    read = StoragePath.read_range
    monkeypatch.setattr(StoragePath, "read_range", lambda *words: asked.append(words[1:]) or read(*words))
    with ObjectFile(source, 700_000) as file:
        file.seek(300_000)
        assert len(file.read(600_000)) == 400_000 and len(file.read(600_000)) == 1 << 18
        assert file.seek(-10, 2) == 999_990 and file.readall() == b"x" * 10
    assert asked[:2] == [(300_000, 400_000), (700_000, 1 << 18)]


@pytest.mark.parametrize(
    ("pattern", "error", "words"),
    [
        ("memory://nothing/here/*.jsonl", DataError, r"--input memory://nothing/here/\*.jsonl: no file has that name"),
        ("memory://nothing/a.jsonl", DataError, r"--input memory://nothing/a.jsonl"),
        ("nfs4://host/a.jsonl", ConfigError, r"--input nfs4://host/a.jsonl: nfs4:// is not supported; give a folder"),
    ],
)
def test_input_that_is_not_there(pattern: str, error: type, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        preprocess(settings(tmp_path, input=(pattern,)))


def test_output_is_written_to_a_folder(tmp_path: Path, local: Path) -> None:
    words = r"--output-prefix s3://bucket/out: a URL is not accepted here.*give a path on this machine"
    with pytest.raises(ConfigError, match=words):
        preprocess(settings(tmp_path, input=(f"{local}/a.jsonl",), output_prefix="s3://bucket/out"))


def test_no_access(server: None, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"--input s3://no-such-bucket/a/\*: no file|--input s3://no-such-bucket/a/\* cannot"
    ):
        preprocess(settings(tmp_path, input=("s3://no-such-bucket/a/*",)))


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "e.parquet", "e.parquet.gz"])
def test_a_storage_that_fails_keeps_the_progress(
    name: str, tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the object and the cause; the same command continues, also with --skip-damaged-files."""
    (local / "0.jsonl").write_bytes((local / "a.jsonl").read_bytes())
    url = uploaded(local)
    changes = {"input": (f"{url}/0.jsonl", f"{url}/{name}"), "skip_damaged_files": True, "workers": 1}
    expected = outcome(tmp_path, **changes)
    read = StoragePath.read_range

    def failing(self: StoragePath, start: int, length: int) -> bytes:
        if self.name == name:
            raise OSError(5, "the object storage failed (SlowDown)", str(self))
        return read(self, start, length)

    with monkeypatch.context() as patch:
        patch.setattr(StoragePath, "read_range", failing)
        begin = rf"--input {re.escape(url)}/{name} cannot be read from byte [\d,]+ on"
        said = rf"{begin}: the object storage failed \(SlowDown\)"
        with pytest.raises(UnreachableFileError, match=said):
            preprocess(settings(tmp_path, **changes), SMALL)
    assert (tmp_path / "out.work" / "progress.json").exists()
    assert outcome(tmp_path, **changes) == expected


def test_an_object_that_changes(tmp_path: Path, local: Path) -> None:
    url = uploaded(local)
    source = describe_input(location(f"{url}/a.jsonl"))
    location(f"{url}/a.jsonl").write_bytes(b"short")
    with pytest.raises(
        UnreachableFileError, match=r"a.jsonl cannot be read from byte 0 on: it ends after 5 of [\d,]+ bytes"
    ):
        ObjectFile(source).read(1000)


def test_a_damaged_object(tmp_path: Path, local: Path) -> None:
    (local / "b.jsonl.gz").write_bytes(gzip.compress(b"{}" * 1000)[:-9])
    url = uploaded(local)
    with pytest.raises(DataError, match=rf"{re.escape(url)}/b.jsonl.gz is truncated"):
        preprocess(settings(tmp_path, input=(f"{url}/b.jsonl.gz",)))
