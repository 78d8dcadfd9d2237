"""Pickles of a few hundred bytes that hold 2^45 elements are refused at once, in one short sentence."""

from __future__ import annotations

import os
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron_core.errors import CheckpointError, quoted
from megatron_core.hub.deepspeed import read_deepspeed_checkpoint
from megatron_core.hub.megatron_lm import pickles
from megatron_core.hub.megatron_lm.pickles import check_metadata, check_sizes, load_metadata, load_tensors
from tests.hub.deepspeed.test_reader import damaged, rewrite

LEVELS, SECONDS = 45, 5.0


def nested(kind: type) -> Any:
    """A list, a tuple or a dict of 2^45 elements."""
    value: Any = 1
    for _ in range(LEVELS):
        value = {"a": value, "b": value} if kind is dict else kind((value, value))
    return value


def bounded(action: Callable[[], object], match: str = "") -> None:
    """``action`` raises one short sentence within ``SECONDS``."""
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=match) as found:
        action()
    assert time.monotonic() - start < SECONDS
    assert len(str(found.value)) < 3_000 and "\n" not in str(found.value)


class _Unhashed(MetadataIndex):
    """An index hashed by identity, pickled as one of torch's class: hashing it would visit all elements."""

    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        return MetadataIndex, (self.fqn, self.offset, self.index)


def _metadata() -> SimpleNamespace:
    """The parts of a ``.metadata`` with one tensor of one chunk."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4]), [chunk])
    index, info = _Unhashed("weight", torch.Size([0])), _StorageInfo("__0_0.distcp", 0, 16)
    metadata = Metadata({"weight": entry}, storage_data={index: info})
    return SimpleNamespace(metadata=metadata, entry=entry, chunk=chunk, index=index, info=info)


PLACES = {
    "shape": ("entry", "size"),
    "chunks": ("entry", "chunks"),
    "properties": ("entry", "properties"),
    "offsets of a chunk": ("chunk", "offsets"),
    "sizes of a chunk": ("chunk", "sizes"),
    "file": ("info", "relative_path"),
    "start": ("info", "offset"),
    "length": ("info", "length"),
    "transforms": ("info", "transform_descriptors"),
    "entries": ("metadata", "state_dict_metadata"),
    "places": ("metadata", "storage_data"),
    "data of the planner": ("metadata", "planner_data"),
}


@pytest.mark.parametrize("kind", [list, tuple, dict])
@pytest.mark.parametrize("place", PLACES)
def test_metadata_with_nested_containers(place: str, kind: type, tmp_path: Path) -> None:
    parts = _metadata()
    record, field = PLACES[place]
    object.__setattr__(getattr(parts, record), field, nested(kind))
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(parts.metadata))
    assert path.stat().st_size < 2_000
    bounded(lambda: load_metadata(path), r"\.metadata cannot be read: .*counting a shared one at each use")


class Keys(dict):
    """A dict with a key, pickled as if it had another one: hashing that would visit all elements."""

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter([(nested(tuple), 1)])


@pytest.mark.parametrize("protocol", range(6))
def test_nested_tuples_as_keys_of_a_dict(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps({"a": Keys()}, protocol=protocol))
    bounded(lambda: load_metadata(path), r"cannot be read: it has a tuple of more than .* at each use")
    for zipped in (True, False):
        torch.save({"a": Keys()}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        bounded(lambda: load_tensors(tmp_path / "a.pt"), r"cannot be read: it has a tuple of more than .* at each use")
    bounded(lambda: load_tensors((tmp_path / "a.pt").read_bytes()), "it has a tuple of more than")


@pytest.mark.parametrize("protocol", range(6))
def test_sizes_of_other_pickles_are_counted(protocol: int) -> None:
    value = [{1: (2, (3, b"x" * 300))}, {4, "x" * 300}, frozenset([5]), OrderedDict(a=1), 2**100, 1.5, None, True]
    check_metadata(pickle.dumps([value, value, tuple(range(10**5))], protocol=protocol))


@pytest.mark.parametrize("field", ["fqn", "offset", "index"])
def test_keys_of_metadata_with_nested_tuples(field: str, tmp_path: Path) -> None:
    """Python visits all elements of a tuple to hash it."""
    parts = _metadata()
    object.__setattr__(parts.index, field, nested(tuple))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(parts.metadata))
    bounded(lambda: load_metadata(tmp_path / ".metadata"), r"\.metadata cannot be read")


class Run:
    """A function that a pickle must not call."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran",)


def test_the_drop_in_reads_metadata_without_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({"weight": torch.arange(6.0)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    found = {"weight": torch.zeros(6)}
    load(found, storage_reader=CachedMetadataFileSystemReader(tmp_path / "folder"), no_dist=True)
    assert torch.equal(found["weight"], torch.arange(6.0))
    path = tmp_path / "folder" / ".metadata"
    for content in (pickle.dumps(Metadata({}, planner_data=Run())), pickle.dumps(Run())):
        path.write_bytes(content)
        reader = CachedMetadataFileSystemReader(tmp_path / "folder", cache_metadata=False)
        bounded(reader.read_metadata, "mkdir, which is not allowed")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_files_of_torch_with_nested_containers(kind: type, tmp_path: Path) -> None:
    path = tmp_path / "common.pt"
    torch.save({"args": {"num_layers": nested(kind)}, "model": {}}, path)
    bounded(lambda: load_tensors(path), r"common\.pt cannot be read: .*counting a shared one at each use")


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("key", ["global_steps", "ds_version", "param_shapes", "buffer_names", "client", "optimizer"])
def test_files_of_deepspeed_with_nested_containers(key: str, kind: type, tmp_path: Path) -> None:
    folder = damaged(tmp_path, "stage2_fp32")
    rewrite(folder / "step3" / "mp_rank_00_model_states.pt", **{key: nested(kind)})
    bounded(lambda: read_deepspeed_checkpoint(folder, verify=False), "counting a shared one at each use")


def test_containers_inside_themselves_and_deep_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MOST_SHARED", 1000)
    itself: list[Any] = []
    itself.append([itself])
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    for value in (itself, {"a": itself}, deep):
        with pytest.raises(ValueError, match="inside more than 100 others"):
            check_sizes(value)
    shared = [0] * 100
    check_sizes([list(range(10**4)), [shared] * 200, {"a": {"b": [torch.ones(3)]}}])
    with pytest.raises(ValueError, match="counting a shared one"):
        check_sizes([shared] * 200)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_value_in_a_message_is_short(kind: type) -> None:
    start = time.monotonic()
    for value in (nested(kind), [nested(kind)] * 100, SimpleNamespace(a=nested(kind)), {1: nested(kind)}):
        assert len(quoted(value)) < 300
    assert time.monotonic() - start < 1.0


def test_how_values_are_quoted() -> None:
    assert quoted("a'b\n") == '"a\'b\\n"'
    assert quoted(["x", 1, None, 2.5, True]) == "['x', 1, None, 2.5, True]"
    assert quoted({"a": (1, 2)}) == "{'a': (1, 2)}"
    assert quoted(list(range(10))) == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert quoted("x" * 1000) == "'" + "x" * 199 + "... (1,002 characters)"
    assert quoted(10**5000) == "an integer of 16,610 bits"
    assert quoted(torch.ones(2)) == "<Tensor>"
    assert quoted([[[[[1]]]]]) == "[[[[[...]]]]]"
    assert quoted([]) == "[]"
