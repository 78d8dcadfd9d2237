"""The cache: hits, distinct keys, repair, concurrent use, and operation without it."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from megatron_core.features.megatron_order import cache as module
from megatron_core.features.megatron_order.build import cached_blend
from megatron_core.features.megatron_order.cache import ABANDONED_SECONDS, IndexCache, key_hash, print_once
from megatron_core.features.megatron_order.order import OrderOptions, SampleOrder, cached_order, order_key

SIZES = np.array([30, 4, 0, 77, 12, 9], dtype=np.int32)
OPTIONS = OrderOptions(sequence_length=5, num_samples=40, seed=3)


@pytest.fixture(autouse=True)
def sentences_are_new() -> Iterator[None]:
    """Print warnings again that another test has already caused."""
    print_once.cache_clear()
    yield
    print_once.cache_clear()


def order_from(folder: Path | None) -> SampleOrder:
    """The order of the documents above, through a cache."""
    return cached_order(IndexCache(folder), "GPTDataset-train", SIZES, range(6), OPTIONS)


def same(a: SampleOrder, b: SampleOrder) -> bool:
    """Whether two orders have the same arrays."""
    pairs = [(x, vars(b)[name]) for name, x in vars(a).items()]
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


def refuse(*args: object, **kwargs: object) -> SampleOrder:
    """Replaces the build, which must not be called."""
    raise AssertionError("built although it is in the cache")


def test_a_second_run_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    first = order_from(folder)
    names = sorted(path.name.split("-", 1)[1] for path in folder.iterdir())
    endings = ["description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy"]
    assert names == [f"GPTDataset-train-{ending}" for ending in endings]
    monkeypatch.setattr("megatron_core.features.megatron_order.order.build_order", refuse)
    second = order_from(folder)
    assert same(first, second) and same(second, first)
    assert all(isinstance(array.base, np.memmap) for array in vars(second).values())
    with pytest.raises(ValueError, match="read-only"):
        second.sample_index[0] = 1


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert same(order_from(None), order_from(tmp_path / "cache"))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_every_option_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"sequence_length": 6, "num_samples": 41, "seed": 4, "extra_tokens": 0, "drop_last_partial": False}
    assert changed.keys() == vars(OPTIONS).keys()
    keys = [order_key(SIZES, range(6), OPTIONS)]
    keys += [order_key(SIZES, range(6), replace(OPTIONS, **{name: value})) for name, value in changed.items()]
    keys += [order_key(SIZES, range(6), replace(OPTIONS, num_samples=None))]
    # Another part of the file, the same number of others, another order, another file.
    keys += [order_key(SIZES, documents, OPTIONS) for documents in (range(5), range(1, 6), [1, 0, 2, 3, 4, 5])]
    keys += [order_key(SIZES[::-1], range(6), OPTIONS)]
    assert len({key_hash(key) for key in keys}) == len(keys)
    order_from(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(module, "FORMAT", 2)
    order_from(tmp_path)
    assert len(list(tmp_path.iterdir())) == 8


def test_documents_of_equal_lengths_are_told_apart() -> None:
    sizes = np.full(4, 5, dtype=np.int32)
    keys = [order_key(sizes, documents, OPTIONS) for documents in (range(2), range(2, 4), [1, 0])]
    assert len({key_hash(key) for key in keys}) == 3


def test_lengths_outside_the_split_do_not_matter() -> None:
    longer = np.append(SIZES, np.int32(5))
    assert order_key(SIZES, range(6), OPTIONS) == order_key(longer, range(6), OPTIONS)


def test_blends_are_entries_of_their_own(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    first = cached_blend(cache, "BlendedDataset-train", [0.3, 0.7], 50)
    again = cached_blend(cache, "BlendedDataset-train", [0.3, 0.7], 50)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(list(tmp_path.iterdir())) == 4
    cached_blend(cache, "BlendedDataset-train", [0.7, 0.3], 50)
    cached_blend(cache, "BlendedDataset-train", [0.3, 0.7], 51)
    cached_blend(cache, "BlendedDataset-train", [0.3, 0.7000000001], 50)
    cached_blend(cache, "BlendedDataset-valid", [0.3, 0.7], 50)
    cached_blend(cache, "BlendedDataset-train", [15, 35], None)
    assert len(list(tmp_path.iterdir())) == 24


def cut(path: Path) -> None:
    """Only the first half of the file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def of_another_type(path: Path) -> None:
    """A complete file with a description that matches only its size and checksum."""
    description = next(path.parent.glob("*description.txt"))
    text = json.loads(description.read_text())
    np.save(path, np.zeros(3, dtype=np.int8))
    entry = text["arrays"]["sample_index"]
    entry["bytes"], entry["crc32"] = path.stat().st_size, module.zlib.crc32(path.read_bytes())
    description.write_text(json.dumps(text))


def empty(path: Path) -> None:
    """An empty file."""
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink, of_another_type])
def test_a_damaged_array_is_built_again(
    damage: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = order_from(None)
    order_from(tmp_path)
    (path,) = tmp_path.glob("*sample_index.npy")
    damage(path)
    assert same(order_from(tmp_path), expected)
    err = capsys.readouterr().err
    assert str(tmp_path) in err and "sample_index.npy" in err and "rebuilding" in err
    monkeypatch.setattr("megatron_core.features.megatron_order.order.build_order", refuse)
    assert same(order_from(tmp_path), expected)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"key": {}, "arrays": {}}', "null", "\x00"])
def test_a_damaged_description_is_built_again(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = order_from(tmp_path)
    (path,) = tmp_path.glob("*description.txt")
    path.write_text(content)
    assert same(order_from(tmp_path), expected)
    assert "damaged" in capsys.readouterr().err
    assert json.loads(path.read_text())["key"]["seed"] == 3


def test_a_description_of_another_entry_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = order_from(tmp_path)
    (path,) = tmp_path.glob("*description.txt")
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 4'))
    assert same(order_from(tmp_path), expected)
    assert "it describes another entry" in capsys.readouterr().err


def test_arrays_without_a_description_are_no_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = order_from(tmp_path)
    (path,) = tmp_path.glob("*description.txt")
    path.unlink()
    assert same(order_from(tmp_path), expected)
    assert path.is_file()
    assert capsys.readouterr().err == ""


def test_a_large_array_is_not_read_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "CHECKED_BYTES", 100)
    order_from(tmp_path)
    (path,) = tmp_path.glob("*sample_index.npy")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert len(order_from(tmp_path)) == 52
    with path.open("ab") as file:
        file.write(b"more")
    order_from(tmp_path)
    assert "sample_index.npy has bytes" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert same(order_from(blocker / "cache"), order_from(None))
    err = capsys.readouterr().err
    assert "continuing in memory" in err and str(blocker) in err
    order_from(blocker / "cache")
    assert capsys.readouterr().err == ""


def test_a_folder_that_may_not_be_written_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = []

    def forbidden(path: Path, mode: str) -> None:
        opened.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", forbidden)
    cache = IndexCache(tmp_path)
    for seed in range(3):
        cached_order(cache, "GPTDataset-train", SIZES, range(6), replace(OPTIONS, seed=seed))
    cached_order(IndexCache(tmp_path), "GPTDataset-valid", SIZES, range(6), OPTIONS)
    assert capsys.readouterr().err.count("Permission denied") == 1
    # The files that could not be opened: descriptions to read, and the first file to write of each cache.
    assert len([path for path in opened if path.name.endswith(".partial")]) == 2


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save = np.save

    def full(file: object, arr: np.ndarray, allow_pickle: bool) -> None:
        save(file, arr[:1], allow_pickle=allow_pickle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert same(order_from(tmp_path), order_from(None))
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def race(folder: Path) -> tuple[int, list[list[int]]]:
    """One of several processes with an empty cache."""
    return os.getpid(), [array.tolist() for array in vars(order_from(folder)).values()]


def test_processes_that_build_the_same_at_once(tmp_path: Path) -> None:
    expected = [array.tolist() for array in vars(order_from(None)).values()]
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        for number in range(8):
            results = list(pool.map(race, [tmp_path / str(number)] * 4))
            assert [arrays for _, arrays in results] == [expected] * 4
            files = list((tmp_path / str(number)).iterdir())
            assert len(files) == 4 and not any("partial" in path.name for path in files)


def test_files_of_killed_jobs_are_removed_and_those_being_written_are_kept(tmp_path: Path) -> None:
    left, growing = (tmp_path / f".{'0a' * 16}-x.npy.{pid}-{'b1' * 8}.partial" for pid in (1, 2))
    foreign = tmp_path / ".notes.partial"
    for path in (left, growing, foreign):
        path.write_bytes(b"half")
    for path in (left, foreign):
        os.utime(path, (0, time.time() - ABANDONED_SECONDS - 60))
    IndexCache(tmp_path).get("numbers", {"n": 3}, ["x"], lambda: {"x": np.arange(3)})
    assert not left.exists() and growing.exists() and foreign.exists()
