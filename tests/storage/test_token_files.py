"""Token files in object storage: the same samples as from disk, each block fetched once, by all processes."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import IndexedDataset
from megatron_core.datasets.sources import token_file_content
from megatron_core.errors import DataError
from megatron_core.locations import CACHE_VARIABLE, location
from megatron_core.preprocess.validate import validate
from megatron_core.storage import tokens as streaming
from megatron_core.storage.paths import StoragePath
from tests.datasets.files import write

BLOCK = 64


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The same file on disk and in storage; blocks of 64 bytes."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(streaming, "BLOCK_BYTES", BLOCK)
    generator = np.random.default_rng(7)
    documents = [generator.integers(0, 500, size).tolist() for size in (5, 40, 1, 0, 77, 13)]
    disk = write(tmp_path / "corpus", documents)
    remote = f"memory://bucket/{uuid.uuid4().hex}/corpus"
    for suffix in (".bin", ".idx"):
        location(f"{remote}{suffix}").write_bytes(Path(f"{disk}{suffix}").read_bytes())
    return disk, remote


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First bytes of all requests."""
    found: list[int] = []
    read = StoragePath.read_range
    monkeypatch.setattr(StoragePath, "read_range", lambda *given: found.append(given[1]) or read(*given))
    return found


def test_equal_tokens_and_one_request_for_a_block(pair: tuple[str, str], fetched: list[int]) -> None:
    disk, remote = (IndexedDataset(prefix) for prefix in pair)
    fetched.clear()
    assert IndexedDataset.exists(pair[1])
    for i in (4, 1, 0, 5, 3, 2):
        np.testing.assert_array_equal(disk[i], remote[i])
        assert not remote[i].flags.writeable
    np.testing.assert_array_equal(disk.tokens(3, 100), remote.tokens(3, 100))
    assert sorted(fetched) == list(range(0, 136 * 4, BLOCK))
    fetched.clear()
    again = IndexedDataset(pair[1])
    np.testing.assert_array_equal(disk.tokens(0, 136), again.tokens(0, 136))
    assert fetched == []


def test_only_the_needed_blocks_are_fetched(pair: tuple[str, str], fetched: list[int]) -> None:
    remote = IndexedDataset(pair[1])
    fetched.clear()
    remote.tokens(70, 2)  # bytes 280 to 288
    assert fetched == [256]


def test_another_process_sees_the_blocks(pair: tuple[str, str], fetched: list[int]) -> None:
    remote = IndexedDataset(pair[1])
    fetched.clear()
    child = os.fork()
    if not child:
        os._exit(0 if len(remote[4]) == 77 and len(fetched) == 6 else 1)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(remote[4], IndexedDataset(pair[0])[4])
    assert fetched == []


def test_checks_and_hashes_are_those_of_the_file_on_disk(pair: tuple[str, str]) -> None:
    assert token_file_content(pair[0]) == token_file_content(pair[1])
    assert validate(pair[1], 500) == validate(pair[0], 500)
    with pytest.raises(DataError, match="the token id"):
        validate(pair[1], 100)


def test_missing_and_lost(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"expected memory://.*none\.bin and memory://.*none\.idx, found no such file"):
        IndexedDataset(f"{pair[1]}_none")
    remote = IndexedDataset(pair[1])

    def lose(*_: object) -> bytes:
        raise OSError(5, "the object storage failed (EndpointConnectionError: no answer)", f"{pair[1]}.bin")

    monkeypatch.setattr(StoragePath, "read_range", lose)
    with pytest.raises(DataError, match=r"corpus\.bin cannot be read at byte 128: .*no answer.*restore the access"):
        remote.tokens(40, 1)
    location(f"{pair[1]}.bin").write_bytes(b"1")
    with pytest.raises(DataError, match=r"corpus\.bin has 1 bytes, expected 544"):
        IndexedDataset(pair[1])
