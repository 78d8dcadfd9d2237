"""Damaged checkpoints are never loaded: data, manifest, tracker file, files of other saves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_core.checkpoint import CheckpointReader, Save, find_checkpoint, open_newest, save_checkpoint
from megatron_core.checkpoint.hashes import READ_BYTES, content_hash, damage, write_file
from megatron_core.checkpoint.reader import open_newest as newest
from megatron_core.errors import CheckpointError
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import edit, save_run, sign, start, train
from tests.checkpoint.test_damage import ONE_LAYER, piece, read, write

CPU = torch.device("cpu")
MANIFEST, TENSORS = "manifest.json", "rank_00000.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small checkpoint with a tokenizer file."""
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    return write(tmp_path / "save", 3, 1.0, extra_files={"tokenizer/vocab.json": tmp_path / "vocab.json"})


def open_one(folder: Path, *, verify: bool = True) -> CheckpointReader | None:
    return open_newest(str(folder), None, verify=verify, device=CPU)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# --- One change in one file. C58


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    """Every 13th bit and all of the last bytes of the manifest; every 13th bit of other files."""
    files = sorted(path for path in saved.rglob("*") if path.is_file())
    assert [path.name for path in files] == [MANIFEST, TENSORS, "vocab.json"]
    for path in files:
        bits = 8 * path.stat().st_size
        for bit in [*range(0, bits, 13), *range(bits - 400 if path.name == MANIFEST else bits, bits)]:
            flip(path, bit)
            with pytest.raises(CheckpointError, match=path.name):
                open_one(saved)
            flip(path, bit)
    with open_one(saved) as reader:
        assert reader.manifest.iteration == 3


def test_every_truncation_and_deletion_is_noticed(saved: Path, tmp_path: Path) -> None:
    for name in (MANIFEST, TENSORS, "tokenizer/vocab.json"):
        whole = (saved / name).read_bytes()
        for length in {0, 1, len(whole) // 2, len(whole) - 1}:
            (saved / name).write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=Path(name).name):
                open_one(saved)
        (saved / name).write_bytes(whole + b" ")
        with pytest.raises(CheckpointError, match=Path(name).name):
            open_one(saved)
        (saved / name).unlink()
        if name == MANIFEST:
            with pytest.raises(CheckpointError, match=r"no complete checkpoint|not a complete checkpoint"):
                open_one(saved.parent)
        else:
            with pytest.raises(CheckpointError, match=Path(name).name):
                open_one(saved)
        (saved / name).write_bytes(whole)
    assert open_one(saved) is not None


def test_without_hashes_the_data_alone_goes_unnoticed(saved: Path) -> None:
    flip(saved / TENSORS, 8 * (saved / TENSORS).stat().st_size - 3)
    assert open_one(saved, verify=False) is not None
    with pytest.raises(CheckpointError, match="its hash differs"):
        open_one(saved)


def _verify(root: Path) -> list[str]:
    with open_newest(str(root), None, verify=False, device=CPU) as reader:
        own = reader.verify(dist.get_rank(), dist.get_world_size())
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors is damaged"):
        newest(str(root), None, device=CPU)
    return own


def test_each_file_is_hashed_by_one_rank_and_all_refuse(tmp_path: Path) -> None:
    def files(rank: int) -> None:
        save = Save(tmp_path, 1, {}, rank=rank, ranks=2)
        if rank == 0:
            save.prepare()
        half = piece(float(rank), 32)
        boxed = type(half.box)((32 * rank,), (32 * rank + 32,))
        save.write([type(half)("w", (64,), boxed, half.memory, owned=True)])
        if rank == 1:
            save.publish()

    files(0)
    files(1)
    flip(tmp_path / "iter_0000001" / "rank_00001.safetensors", 2000)
    found = run_ranks(2, _verify, tmp_path)
    assert sorted(map(len, found)) == [0, 1], "one rank read it, not both"


def test_hash_of_a_file_larger_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    data = os.urandom(2 * READ_BYTES + 17)
    written = write_file(tmp_path / "x", data)
    assert (written.size, content_hash(tmp_path / "x")) == (len(data), written.hash)
    assert damage(tmp_path, {"x": written}) == {}


# --- Files of another save.


@pytest.mark.parametrize("other", [3, 4])
def test_a_file_of_another_save_is_refused(other: int, saved: Path, tmp_path: Path) -> None:
    """Also with the same iteration and the same sizes, and if hashes are not compared."""
    theirs = write(tmp_path / "other", other, 2.0)
    shutil.copyfile(theirs / TENSORS, saved / TENSORS)
    with pytest.raises(CheckpointError, match=rf"another save \(iteration {other}\) than manifest.json"):
        read(saved)
    with pytest.raises(CheckpointError, match=TENSORS):
        open_one(saved)


def test_a_checkpoint_in_the_folder_of_another_iteration_is_refused(saved: Path) -> None:
    moved = saved.rename(saved.with_name("iter_0000007"))
    with pytest.raises(CheckpointError, match="it is of iteration 3, but in iter_0000007"):
        open_one(moved)


# --- The manifest with a correct checksum after each change: errors that a hash does not reveal.


def _of(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[int(key)] if isinstance(content, list) else content[key]
        content[keys[-1]] = value

    return change


def _without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[int(key)] if isinstance(content, list) else content[key]
        del content[keys[-1]]

    return change


BOX = ("tensors", "w", "boxes", "0")
CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no format": _without("format"),
    "other format": _of("format", value="torch"),
    "other version": _of("version", value=99),
    "version is text": _of("version", value="2"),
    "version is huge": _of("version", value=10**400),
    "no iteration": _without("iteration"),
    "iteration is text": _of("iteration", value="3"),
    "iteration is true": _of("iteration", value=True),
    "iteration is negative": _of("iteration", value=-1),
    "iteration is a fraction": _of("iteration", value=3.0),
    "iteration is huge": _of("iteration", value=10**30),
    "another iteration": _of("iteration", value=4),
    "iteration of the state": _of("state", "iteration", value=4),
    "no save id": _without("save_id"),
    "save id is a number": _of("save_id", value=1),
    "other save id": _of("save_id", value="0" * 32),
    "no state": _without("state"),
    "state is a list": _of("state", value=[]),
    "no files": _without("files"),
    "files is null": _of("files", value=None),
    "file is a number": _of("files", TENSORS, value=1),
    "file without size": _without("files", TENSORS, "bytes"),
    "size is negative": _of("files", TENSORS, "bytes", value=-5),
    "other size": _of("files", TENSORS, "bytes", value=1),
    "file without hash": _without("files", TENSORS, "xxh3_128"),
    "hash is null": _of("files", TENSORS, "xxh3_128", value=None),
    "other hash": _of("files", TENSORS, "xxh3_128", value="0" * 32),
    "file above": _of("files", "../x", value={"bytes": 1, "xxh3_128": ""}),
    "file above inside": _of("files", "a/../../x", value={"bytes": 1, "xxh3_128": ""}),
    "absolute file": _of("files", "/etc/passwd", value={"bytes": 1, "xxh3_128": ""}),
    "file without a name": _of("files", "", value={"bytes": 1, "xxh3_128": ""}),
    "file with a backslash": _of("files", "..\\x", value={"bytes": 1, "xxh3_128": ""}),
    "file with a NUL": _of("files", "x\0", value={"bytes": 1, "xxh3_128": ""}),
    "file that is absent": _of("files", "rank_00009.safetensors", value={"bytes": 1, "xxh3_128": ""}),
    "no tensors": _without("tensors"),
    "tensors is a list": _of("tensors", value=[1]),
    "tensor is null": _of("tensors", "w", value=None),
    "tensor without shape": _without("tensors", "w", "shape"),
    "shape is a number": _of("tensors", "w", "shape", value=64),
    "shape with a fraction": _of("tensors", "w", "shape", value=[64.0]),
    "negative shape": _of("tensors", "w", "shape", value=[-64]),
    "other shape": _of("tensors", "w", "shape", value=[65]),
    "shape of two": _of("tensors", "w", "shape", value=[8, 8]),
    "huge shape": _of("tensors", "w", "shape", value=[10**400]),
    "tensor without dtype": _without("tensors", "w", "dtype"),
    "unknown dtype": _of("tensors", "w", "dtype", value="F7"),
    "other dtype": _of("tensors", "w", "dtype", value="F64"),
    "no boxes": _without("tensors", "w", "boxes"),
    "empty boxes": _of("tensors", "w", "boxes", value=[]),
    "box is a number": _of("tensors", "w", "boxes", value=[3]),
    "box without file": _without(*BOX, "file"),
    "box in a file above": _of(*BOX, "file", value="../../x.safetensors"),
    "box in an absolute file": _of(*BOX, "file", value="/x.safetensors"),
    "box in the manifest": _of(*BOX, "file", value=MANIFEST),
    "other key": _of(*BOX, "key", value="v@0"),
    "key is null": _of(*BOX, "key", value=None),
    "box begins late": _of(*BOX, "start", value=[1]),
    "box begins before 0": _of(*BOX, "start", value=[-1]),
    "box ends outside": _of(*BOX, "stop", value=[65]),
    "box ends before it begins": _of(*BOX, "stop", value=[0]),
    "box of other rank": _of(*BOX, "stop", value=[8, 8]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_cannot_be_right_is_one_sentence(change: str, saved: Path) -> None:
    edit(saved, CHANGES[change])
    with pytest.raises(CheckpointError) as error:
        open_one(saved)
        read(saved)
    sentence = str(error.value)
    assert str(saved) in sentence and "\n" not in sentence and len(sentence) < 600


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "not JSON": lambda data: b"{",
    "list": lambda data: b"[1]",
    "number": lambda data: b"3",
    "null": lambda data: b"null",
    "no UTF-8": lambda data: b"\xff\xfe" + data,
    "binary": lambda data: os.urandom(1000),
    "deep": lambda data: b'{"state": ' + b"[" * 100_000,
    "deep object": lambda data: b'{"a":' * 100_000,
    "huge number": lambda data: data.replace(b'"version": 2', b'"version": ' + b"9" * 100_000),
    "key twice": lambda data: sign(data.replace(b'"version": 2', b'"version": 2, "version": 2')),
    "tensor twice": lambda data: sign(data.replace(b'"tensors": {', b'"tensors": {"w": 1, ')),
    "no checksum": lambda data: data.rpartition(b",")[0] + b"\n}",
    "changed": lambda data: data.replace(b'"iteration": 3', b'"iteration": 4'),
    "spaces": lambda data: data + b" ",
}


@pytest.mark.parametrize("change", TEXTS)
def test_a_manifest_that_is_no_manifest_is_one_sentence(change: str, saved: Path) -> None:
    path = saved / MANIFEST
    path.write_bytes(TEXTS[change](path.read_bytes()))
    with pytest.raises(CheckpointError, match=MANIFEST) as error:
        open_one(saved)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_links_out_of_the_folder_are_refused(saved: Path, tmp_path: Path) -> None:
    (saved / TENSORS).rename(tmp_path / "elsewhere")
    (saved / TENSORS).symlink_to(tmp_path / "elsewhere")
    for verify in (True, False):
        with pytest.raises(CheckpointError, match="goes through a symbolic link"):
            open_one(saved, verify=verify)


@pytest.mark.parametrize(
    "text", [b"", b"x", b"-1", b"1e3", b"3.0", b"\xff", "\u00b2".encode(), b"9" * 10_000, b"4", b"release", None]
)
def test_a_damaged_tracker_file_hides_no_checkpoint(
    text: bytes | None, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = saved.parent / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    if text is not None:
        tracker.write_bytes(text)
    with open_one(saved.parent) as reader:
        assert reader.folder == saved
    assert "latest_checkpointed_iteration.txt" in capsys.readouterr().out
    shutil.rmtree(saved)
    if text is None:
        assert find_checkpoint(str(saved.parent)) is None
    else:
        with pytest.raises(CheckpointError, match=r"--ckpt-step|no complete checkpoint|not a complete checkpoint"):
            find_checkpoint(str(saved.parent))


# --- State that a run reads from a checkpoint.


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[Path]:
    run = start(ONE_LAYER | {"save": str(tmp_path)})
    train(run, 1)
    yield save_run(run)


@pytest.mark.parametrize(
    "change",
    [
        _without("state", "consumed_samples"),
        _of("state", "consumed_samples", value=-4),
        _of("state", "consumed_tokens", value="many"),
        _of("state", "optimizer_steps", value=1.5),
        _of("state", "vocab_size", value=None),
        _of("state", "loss_scale", value=[]),
        _of("state", "loss_scale", value={"scale": "x"}),
        _of("state", "layout", value=3),
        _of("state", "consumed_samples", value=2**63),
        _of("state", "rollbacks", value="x"),
        _of("state", "left_out", value=[[]]),
        _of("state", "config", value=[]),
        _of("state", "config", "num_layers", value="two"),
        _of("state", "config", "hidden_size", value=10**400),
    ],
)
def test_a_state_of_wrong_types_is_one_sentence(change: Callable[[dict[str, Any]], None], run_folder: Path) -> None:
    edit(run_folder, change)
    with pytest.raises(CheckpointError, match=r"manifest\.json: invalid "):
        start(ONE_LAYER | {"load": str(run_folder)})


def test_missing_and_unexpected_tensors_are_listed(run_folder: Path) -> None:
    """All of them in one error: here names in the manifest are changed, as for a renamed layer."""

    def rename(content: dict[str, Any]) -> None:
        tensors = content["tensors"]
        for name in [name for name in tensors if "final_layernorm" in name]:
            tensors[name.replace("final_layernorm", "last_norm")] = tensors.pop(name)

    edit(run_folder, rename)
    with pytest.raises(CheckpointError) as error:
        start(ONE_LAYER | {"load": str(run_folder)})
    told = str(error.value)
    assert "6 missing" in told and "6 unexpected" in told
    assert "model.decoder.final_layernorm.weight" in told and "model.decoder.last_norm.weight" in told


def test_the_manifest_has_all_settings_and_the_position_in_the_data(run_folder: Path) -> None:
    content = json.loads((run_folder / MANIFEST).read_text())
    config = start(ONE_LAYER | {"save": str(run_folder.parent), "load": str(run_folder.parent)}).config.flat()
    stored = content["state"]["config"]
    assert stored.keys() == config.keys() and stored["load"] is None and stored["num_layers"] == 1
    assert content["state"]["consumed_samples"] == 4


def test_a_failing_disk_is_no_traceback(saved: Path) -> None:
    (saved / TENSORS).unlink()
    (saved / TENSORS).mkdir()
    for verify in (True, False):
        with pytest.raises(CheckpointError, match=TENSORS):
            open_one(saved, verify=verify)
            read(saved)


def test_save_checkpoint_leaves_nothing_of_itself(tmp_path: Path) -> None:
    folder = save_checkpoint(Save(tmp_path, 1, {}), [piece(1.0)], lambda ok: ok)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, TENSORS]
