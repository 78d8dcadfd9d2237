"""Faults of a real S3 server between it and the client: each is an error that names its cause, and loses nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_core.locations import CACHE_VARIABLE, in_storage, location
from megatron_core.storage.paths import StoragePath
from tests.storage.s3_chaos import CAUSES, disturbed_server
from tests.storage.server import BUCKET

for package in ("s3fs", "moto.server"):
    pytest.importorskip(package, reason=f"{package} is not installed (make install-test)")
CONTENT = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file with the kind of fault of every request."""
    import s3fs

    folder = tmp_path_factory.mktemp("proxy")
    with disturbed_server(folder, 1) as (environment, _), pytest.MonkeyPatch.context() as patch:
        for name, value in (environment | {CACHE_VARIABLE: str(folder), "AWS_MAX_ATTEMPTS": "1"}).items():
            patch.setenv(name, value)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)  # repeating a request takes seconds
        patch.setattr(s3fs.S3FileSystem, "cachable", False)
        yield folder / "always"


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["throttled", "unavailable", "internal", "expired", "reset", "truncated"])
def test_an_error_names_its_cause_and_loses_nothing(always: Path, kind: str) -> None:
    path = in_storage(location(f"s3://{BUCKET}/{kind}/object"))
    assert isinstance(path, StoragePath)
    path.write_bytes(CONTENT)
    always.write_text(kind)
    actions = (
        [path.read_bytes] if kind == "truncated" else [path.read_bytes, path.stat, path.is_file, path.parent.files]
    )
    actions += [] if kind == "truncated" else [lambda: path.write_bytes(b"other")]
    try:
        for action in actions:
            with pytest.raises(OSError, match=r"the object storage failed|access was denied") as error:
                action()
            assert re.search(CAUSES[kind], str(error.value)) and str(path.parent) in str(error.value), error.value
    finally:
        always.unlink()
    assert path.read_bytes() == CONTENT and path.is_file()
