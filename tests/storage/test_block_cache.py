"""The cache of limited size: the bytes of the storage, whatever is replaced, damaged or killed meanwhile."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import numpy as np
import pytest

from megatron_core.config import DataConfig
from megatron_core.data_parts.manifest import PartEntry, PartList
from megatron_core.datasets import IndexedDataset, build_datasets
from megatron_core.errors import ConfigError
from megatron_core.locations import CACHE_VARIABLE, location
from megatron_core.storage import block_cache as caching
from megatron_core.storage import tokens as streaming
from megatron_core.storage.block_cache import SIZE_VARIABLE, WAYS, BlockCache, size_limit
from megatron_core.storage.paths import StoragePath
from tests.datasets.files import write

BLOCK = 64


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Blocks of 64 bytes, and a cache of 16 of them."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(SIZE_VARIABLE, "2M")
    monkeypatch.setattr(caching, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(streaming, "SMALL_BLOCK", BLOCK)
    monkeypatch.setattr(caching, "size_limit", lambda: 2 * WAYS * BLOCK)
    return tmp_path


def test_parts_in_storage_are_read_as_one_file_on_disk(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    documents = [random.integers(0, 500, int(random.integers(1, 40))).tolist() for _ in range(80)]
    disk = write(small / "whole", documents)
    remote = f"memory://bucket/{uuid.uuid4().hex}/corpus"
    entries = []
    for number, first in enumerate(range(0, 80, 20)):
        pair = write(small / f"part{number}", documents[first : first + 20])
        entries.append(PartEntry(f"part{number}", 20, 20, IndexedDataset(pair).num_tokens))
        for suffix in (".bin", ".idx"):
            content = Path(f"{pair}{suffix}").read_bytes()
            location(f"{remote.removesuffix('corpus')}part{number}{suffix}").write_bytes(content)
    location(f"{remote}.parts.json").write_bytes(PartList("int32", tuple(entries)).encoded())
    requests: list[str] = []
    read = StoragePath.read_range
    monkeypatch.setattr(StoragePath, "read_range", lambda *words: requests.append(str(words[0])) or read(*words))
    expected, samples = (
        build_datasets(DataConfig(data_path=(prefix,), seq_length=16, split="1"), seed=1).train
        for prefix in (disk, remote)
    )
    for _ in range(2):
        for index in range(expected.samples_per_epoch):
            assert np.array_equal(samples[index]["tokens"], expected[index]["tokens"])
    # Of an index, only the header and the entries at the borders of the splits.
    assert sum(name.endswith(".idx") for name in requests) <= 3 * len(entries)
    size = sum(path.stat().st_size for path in (small / "cache").glob("pool_*_blocks"))
    assert size == 2 * WAYS * BLOCK
    # 1,600 tokens of 4 bytes need 100 blocks, of which 16 fit.
    assert sum(name.endswith(".bin") for name in requests) > 150


def test_a_block_is_fetched_once_while_it_fits(small: Path) -> None:
    cache = BlockCache(small / "cache", 2 * WAYS * BLOCK)
    assert cache.read("a", lambda: b"one") == b"one".ljust(BLOCK, b"\0")
    other = BlockCache(small / "cache", 2 * WAYS * BLOCK)  # as another process
    assert other.read("a", lambda: b"two")[:3] == b"one"
    blocks = next((small / "cache").glob("pool_*_blocks"))
    blocks.write_bytes(bytes(blocks.stat().st_size))  # of a machine that lost power
    assert other.read("a", lambda: b"two")[:3] == b"two"
    # Another size is another cache, and the old one is deleted.
    BlockCache(small / "cache", 4 * WAYS * BLOCK)
    assert not blocks.exists()


def test_processes_that_replace_each_others_blocks_read_right_bytes(small: Path) -> None:
    children = []
    for seed in range(3):
        child = os.fork()
        if not child:
            random = np.random.default_rng(seed)
            cache = BlockCache(small / "cache", WAYS * BLOCK)
            wrong = 0
            for number in random.integers(0, 12, 2000).tolist():
                content = bytes([number + 1]) * BLOCK
                wrong += cache.read(str(number), lambda content=content: content) != content
            os._exit(min(wrong, 1))
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


@pytest.mark.parametrize(("text", "size"), [("", None), ("500G", 500 << 30), ("2M", 2 << 20), ("4194304", 1 << 22)])
def test_sizes(text: str, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, text)
    assert size_limit() == size


@pytest.mark.parametrize("text", ["1M", "much", "-5G", "1.5T", "G"])
def test_sizes_that_cannot_be_used(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{SIZE_VARIABLE}={text} must be a number of bytes"):
        size_limit()
