"""Checkpoints in object storage (in memory here): contents, order of the objects, retention, failures."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_core import parallel_state
from megatron_core.checkpoint import CheckpointReader
from megatron_core.checkpoint.folder import TRACKER, complete_iterations, find_candidates, rank_file
from megatron_core.checkpoint.writer import Save, save_checkpoint
from megatron_core.commands import replay_step
from megatron_core.errors import CheckpointError
from megatron_core.locations import CACHE_VARIABLE, location, run_folder
from megatron_core.storage.paths import StoragePath, StorageWriter
from megatron_core.training.compatibility import stored_config
from megatron_core.training.loop import train
from tests.checkpoint.runs import stored
from tests.checkpoint.test_damage import piece
from tests.runs import tiny_run


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads of a tiny model wait for each other on a busy machine
    yield f"memory://bucket/{uuid.uuid4().hex}"
    torch.set_num_threads(threads)
    parallel_state.destroy_model_parallel()


def names(save: str) -> list[str]:
    """The objects below the folder."""
    files = location(save)._files  # type: ignore[attr-defined]
    root = save.removeprefix("memory:/")
    return sorted(name.removeprefix(root + "/") for name in files.find(save))


@pytest.mark.parametrize("async_save", [False, True])
def test_the_same_checkpoint_as_on_disk(save: str, tmp_path: Path, async_save: bool) -> None:
    settings: dict[str, object] = {"train_iters": 4, "save_interval": 1, "keep_last": 2, "async_save": async_save}
    settings["lr_decay_style"] = "constant"
    train(tiny_run(**settings, save=save), [])
    train(tiny_run(**settings, save=str(tmp_path / "disk")), [])
    found = [name for name in names(save) if not name.endswith((".jsonl", ".yaml"))]
    files = ("manifest.json", "rank_00000.safetensors")
    assert found == [*(f"iter_{n:07d}/{name}" for n in (3, 4) for name in files), TRACKER]
    assert (location(save) / TRACKER).read_text() == "4"
    disk = stored(tmp_path / "disk" / "iter_0000004")
    with CheckpointReader(location(save) / "iter_0000004") as reader:
        assert reader.verify() == []
        assert disk.keys() == reader.manifest.tensors.keys()
        for name, tensor in disk.items():
            assert torch.equal(reader.read(name), tensor), name
    # A resumed run equals an uninterrupted one, and its files are found again on another machine.
    resumed = tiny_run(**(settings | {"train_iters": 6}), save=save, load=save)
    assert resumed.state.iteration == 4
    train(resumed, [])
    whole = tiny_run(train_iters=6, lr_decay_style="constant")
    train(whole, [])
    for ours, theirs in zip(resumed.stages[0].parameters(), whole.stages[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (location(save) / TRACKER).read_text() == "6"


def test_parts_of_tensors(save: str) -> None:
    run = tiny_run(train_iters=1, save=save)
    train(run, [])
    reads: list[int] = []
    with CheckpointReader(location(save) / "iter_0000001") as reader:
        name = "model.embedding.weight" if "model.embedding.weight" in reader.manifest.tensors else ""
        name = name or max(reader.manifest.tensors, key=lambda each: reader.manifest.tensors[each].shape[0])
        tensor = reader.manifest.tensors[name]
        part = reader._slice(tensor, tensor.boxes[0])
        read = StoragePath.read_range
        StoragePath.read_range = lambda *given: reads.append(given[2]) or read(*given)  # type: ignore[method-assign]
        try:
            rows = part[(slice(3, 7), *(slice(None) for _ in tensor.shape[1:]))]
            inner = part[(slice(3, 7), *(slice(1, 2) for _ in tensor.shape[1:]))]
        finally:
            StoragePath.read_range = read  # type: ignore[method-assign]
        whole = reader.read(name)
    assert torch.equal(rows, whole[3:7])
    assert torch.equal(inner, whole[(slice(3, 7), *(slice(1, 2) for _ in tensor.shape[1:]))])
    assert reads == [4 * whole[0].nbytes] * 2


def test_the_manifest_completes_a_checkpoint(save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is stored before it, the tracker after it, and a save that fails leaves no objects."""
    order: list[str] = []
    close, write = StorageWriter.close, StoragePath.write_bytes
    monkeypatch.setattr(StorageWriter, "close", lambda own: order.append(own._path.name) or close(own))
    monkeypatch.setattr(StoragePath, "write_bytes", lambda own, data: order.append(own.name) or write(own, data))
    train(tiny_run(train_iters=1, save=save), [])
    at = [order.index(name) for name in ("rank_00000.safetensors", "rank_00000.report", "manifest.json", TRACKER)]
    assert at == sorted(at)
    before = names(save)

    def full(own: StorageWriter, data: bytes) -> int:
        raise OSError(5, "the object storage failed (ClientError: SlowDown)", str(own._path))

    run = tiny_run(train_iters=3, save=save, load=save)
    monkeypatch.setattr(StorageWriter, "write", full)
    with pytest.raises(
        CheckpointError, match=r"write its tensors of a checkpoint to .*ClientError: SlowDown.*iter_0000003"
    ):
        train(run, [])
    assert [name for name in names(save) if not name.endswith(".jsonl")] == [
        n for n in before if not n.endswith(".jsonl")
    ]
    assert [path.name for path in find_candidates(save).folders] == ["iter_0000001"]


def test_incomplete_and_damaged_objects(save: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_run(train_iters=2, save=save, save_interval=1), [])
    root = location(save)
    (root / "iter_0000003" / "rank_00000.safetensors").write_bytes(b"left by a killed run")
    (root / ".iter_0000003.incomplete" / "save_id").write_bytes(b"0")
    tensors = root / "iter_0000002" / "rank_00000.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(bytes(data))
    resumed = tiny_run(train_iters=3, save=save, load=save)
    assert resumed.state.iteration == 1
    assert "skipped a damaged checkpoint: memory://" in capsys.readouterr().out
    train(resumed, [])
    assert not [name for name in names(save) if "incomplete" in name]
    assert find_candidates(save).folders[0] == root / "iter_0000003"


def test_a_run_starts_again_if_its_first_save_was_interrupted(save: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = location(save)
    (root / "iter_0000001" / "rank_00000.safetensors").write_bytes(b"left by a killed run")
    run = tiny_run(train_iters=1, save=save, load=save)
    assert run.state.iteration == 0 and "iter_0000001 has no manifest.json: its save was" in capsys.readouterr().out
    train(run, [])
    assert [path.name for path in find_candidates(save).folders] == ["iter_0000001"]
    # With a tracker file a save was completed once: the checkpoint is damaged.
    (root / "iter_0000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="iter_0000001 is not a complete checkpoint"):
        find_candidates(save)


def test_storage_that_fails_while_a_save_is_given_up(save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is deleted unless the manifest is known to be missing: the save may have been completed."""
    failed = Save(location(save), 1, {})
    failed.prepare()
    (failed.final / "rank_00000.safetensors").write_bytes(b"1")

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("reset")

    with monkeypatch.context() as patch:
        patch.setattr(location(save)._files.files, "info", fail)  # type: ignore[attr-defined]
        failed.give_up()
        assert "iter_0000001/rank_00000.safetensors" in names(save)
    failed.give_up()
    assert names(save) == []


def test_storage_that_fails_when_the_tracker_is_read(save: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not taken for one of another program, and no other checkpoint is loaded."""
    save_checkpoint(Save(location(save), 1, {}), [piece(1.0)], lambda ok: ok)
    read = StoragePath.read_range

    def fail(path: StoragePath, *given: int) -> bytes:
        if path.name == TRACKER:
            raise OSError(5, "the object storage failed (ClientError: SlowDown)", str(path))
        return read(path, *given)

    monkeypatch.setattr(StoragePath, "read_range", fail)
    with pytest.raises(CheckpointError, match=r"prepare the folder of a checkpoint: .*ClientError: SlowDown"):
        save_checkpoint(Save(location(save), 2, {}), [piece(1.0)], lambda ok: ok)
    with pytest.raises(OSError, match="SlowDown"):
        find_candidates(save)


def test_objects_of_others_are_kept(save: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By rotation, and when an iteration is saved again."""
    root = location(save)
    for iterations in (1, 2):
        train(tiny_run(train_iters=iterations, save=save, load=save), [])
        (root / f"iter_000000{iterations}" / "sub" / "notes.txt").write_text("the user's notes")
    save_checkpoint(Save(root, 2, {}), [piece(1.0)], lambda ok: ok)
    save_checkpoint(Save(root, 3, {}, keep_last=1), [piece(1.0)], lambda ok: ok)
    assert complete_iterations(root) == [3]
    for iteration in (1, 2):
        folder = root / f"iter_000000{iteration}"
        assert (folder / "sub" / "notes.txt").read_text() == "the user's notes"
        assert {path.name for path in folder.iterdir()} == {"sub", ".checkpoint_was_deleted"}
    assert capsys.readouterr().out.count("keeps sub/notes.txt") == 3
    save_checkpoint(Save(root, 4, {}, keep_last=1), [piece(1.0)], lambda ok: ok)


def test_another_run_is_not_replaced(save: str) -> None:
    train(tiny_run(train_iters=1, save=save), [])
    with pytest.raises(CheckpointError, match="holds checkpoints of another run, up to iteration 1"):
        tiny_run(train_iters=1, save=save)
    train(tiny_run(train_iters=2, save=save, overwrite_checkpoints=True), [])
    assert [path.name for path in find_candidates(save).folders] == ["iter_0000002"]


@pytest.mark.parametrize("present", [[], [0], [0, 0], [0, 2]])
def test_each_rank_must_have_reported(present: list[int], save: str, tmp_path: Path) -> None:
    """Otherwise an incomplete checkpoint would look complete."""
    for folder in (location(save), tmp_path):
        own = Save(folder, 1, {}, ranks=2)
        own.prepare("id")
        texts = [json.dumps({"name": rank_file(rank), "shapes": {}, "boxes": [], "error": ""}) for rank in present]
        with pytest.raises(CheckpointError, match="2 ranks must report once each"):
            own.complete(texts)
        assert not (own.contents / "manifest.json").exists()


def test_settings_of_a_checkpoint_without_tokenizer_files(save: str) -> None:
    run = tiny_run(train_iters=1, save=save)
    train(run, [])
    assert stored_config(location(save) / "iter_0000001").model == run.config.model


def test_a_step_is_replayed(save: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_run(train_iters=2, save_interval=1, save=save), [])
    capsys.readouterr()
    assert replay_step.main([f"{save}/iter_0000001"]) == 0
    assert capsys.readouterr().out.startswith("iteration 2, ")


def test_other_files_are_on_this_machine(save: str) -> None:
    assert run_folder(save).is_relative_to(run_folder(save).parents[1])
    run = tiny_run(train_iters=1, save=save)
    run.saver.keep_config()
    train(run, [])
    assert (run_folder(save) / "config.yaml").is_file()
    assert "config.yaml" in names(save)
