"""Incomplete or damaged checkpoints, or those of another model, are never loaded, with a clear error."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from megatron_core import parallel_state
from megatron_core.checkpoint import Box, CheckpointReader, Save, TensorBox, find_checkpoint, save_checkpoint, writer
from megatron_core.checkpoint.hashes import StoredFile
from megatron_core.errors import CheckpointError
from megatron_core.training.compatibility import differing_settings
from megatron_core.training.pretrain import notes
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.operations import file_operations
from tests.checkpoint.runs import compare, save_run, start, stored, train
from tests.runs import tiny_config

ONE_LAYER = {"num_layers": 1}


@pytest.fixture(autouse=True)
def _no_layout_stays() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a checkpoint after one step."""
    run = start(ONE_LAYER | {"save": str(tmp_path)})
    train(run, 1)
    return save_run(run)


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is not a folder"):
        find_checkpoint(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"hidden_size": 32}, "hidden_size=32, but the checkpoint was trained with hidden_size=16"),
        ({"vocab_size": 102}, "word_embeddings.weight has the shape [101, 16]; this run needs [102, 16]"),
        ({"num_layers": 2}, "num_layers=2, but the checkpoint was trained with num_layers=1"),
        ({"untie_embeddings_and_output_weights": True}, "untie_embeddings_and_output_weights=True, but"),
        ({"swiglu": True, "ffn_hidden_size": 32}, "swiglu=True, but"),
    ],
)
def test_checkpoint_of_another_model(other: dict, told: str, saved: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        start(ONE_LAYER | other | {"load": str(saved.parent)})
    assert told in str(error.value)


def test_checkpoint_of_a_larger_model(tmp_path: Path) -> None:  # C34
    """Two layers in the checkpoint but one in the model: half of the training would be lost."""
    save_run(start({"num_layers": 2, "save": str(tmp_path)}))
    with pytest.raises(CheckpointError, match="num_layers=1, but the checkpoint was trained with num_layers=2"):
        start(ONE_LAYER | {"load": str(tmp_path)})


def test_incomplete_folders_are_no_checkpoints(saved: Path) -> None:  # C44
    root = saved.parent
    shutil.copytree(saved, root / ".iter_0000009.incomplete")
    shutil.copytree(saved, root / "iter_0000008")
    (root / "iter_0000008" / "manifest.json").unlink()
    assert find_checkpoint(str(root)) == saved
    for step in (8, 9):
        with pytest.raises(CheckpointError, match=f"iter_000000{step} is not a complete checkpoint.*iter_0000001"):
            find_checkpoint(str(root), step)
    assert find_checkpoint(str(saved)) == saved, "the folder of one iteration may be named itself"


def test_nothing_to_load(tmp_path: Path) -> None:
    assert find_checkpoint(str(tmp_path / "nowhere")) is None
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*without --exit-on-missing-checkpoint"):
        start(ONE_LAYER | {"load": str(tmp_path), "exit_on_missing_checkpoint": True})
    with pytest.raises(CheckpointError, match=r"holds no checkpoint"):
        start(ONE_LAYER | {"load": str(tmp_path), "finetune": True})
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint.*Only the folder of --save may be without a checkpoint"
    ):
        start(ONE_LAYER | {"load": str(tmp_path)})
    run = start(ONE_LAYER | {"load": str(tmp_path), "save": str(tmp_path)})
    assert run.state.iteration == 0 and not run.loaded
    assert any("has no checkpoint" in note for note in notes(run))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(CheckpointError, match=r"'release'.*--ckpt-step"):
        find_checkpoint(str(tmp_path))
    os.remove(tmp_path / "latest_checkpointed_iteration.txt")
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")  # reading it would block forever
    with pytest.raises(CheckpointError, match=r"is not a file; choose an iteration with --ckpt-step"):
        find_checkpoint(str(tmp_path))


def test_a_checkpoint_without_manifest_is_no_empty_folder(saved: Path) -> None:
    """A run that should resume from it would start from scratch."""
    (saved / "manifest.json").unlink()
    (saved.parent / "latest_checkpointed_iteration.txt").unlink()
    for folder in (saved, saved.parent):
        with pytest.raises(CheckpointError, match=r"iter_0000001 has no manifest\.json, and there is no complete"):
            find_checkpoint(str(folder))


def test_files_hold_numbers_and_text_alone(saved: Path) -> None:
    """No pickle: only JSON, safetensors and one number."""
    files = sorted(path for path in saved.parent.rglob("*") if path.is_file())
    assert [str(path.relative_to(saved.parent)) for path in files] == [
        ".lock",
        "iter_0000001/manifest.json",
        "iter_0000001/rank_00000.safetensors",
        "latest_checkpointed_iteration.txt",
    ]
    json.loads(files[1].read_text())
    with safe_open(files[2], framework="pt") as file:
        assert file.keys()
    assert files[3].read_text() == "1"


# Tests of the writer only, with a tensor whose elements all equal the number of the save.


def piece(value: float, numel: int = 64) -> TensorBox:
    return TensorBox("w", (numel,), Box((0,), (numel,)), torch.full((numel,), value), owned=True)


def write(root: Path, iteration: int, value: float, numel: int = 64, **settings: object) -> Path:
    return save_checkpoint(Save(root, iteration, {}, **settings), [piece(value, numel)], lambda ok: ok)


def read(folder: Path, numel: int = 64) -> torch.Tensor:
    into = piece(-1.0, numel)
    with CheckpointReader(folder) as reader:
        reader.fill([into])
    return into.memory


def test_saving_over_an_iteration(tmp_path: Path) -> None:  # C44
    """The new checkpoint replaces the old one as a whole: nothing is deleted file by file under the final name."""
    write(tmp_path, 3, 1.0)
    with file_operations(check_not_deleted):
        folder = write(tmp_path, 3, 2.0)
    assert (read(folder) == 2.0).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def check_not_deleted(event: str, path: str) -> None:
    assert event not in ("os.remove", "os.rmdir") or "/iter_" not in path, path


def test_left_overs_of_a_crash_are_in_nobodys_way(tmp_path: Path) -> None:
    for name in (".iter_0000003.incomplete", ".iter_0000003.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00007.safetensors").write_bytes(b"rubbish")
    assert (read(write(tmp_path, 3, 1.0)) == 1.0).all()
    assert sorted(path.name for path in (tmp_path / "iter_0000003").iterdir()) == [
        "manifest.json",
        "rank_00000.safetensors",
    ]


def test_weights_may_change_right_after_the_save(tmp_path: Path) -> None:  # C44
    mine = piece(1.0)
    folder = save_checkpoint(Save(tmp_path, 1, {}), [mine], lambda ok: ok)
    mine.memory.fill_(7.0)
    assert (read(folder) == 1.0).all()


def test_files_of_the_tokenizer_go_along(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    folder = write(tmp_path / "save", 1, 1.0, extra_files={"tokenizer/vocab.json": tmp_path / "vocab.json"})
    assert (folder / "tokenizer" / "vocab.json").read_text() == "{}"


def test_tensor_that_nobody_wrote_whole(tmp_path: Path) -> None:
    half = TensorBox("w", (4,), Box((0,), (2,)), torch.zeros(2), owned=True)
    with pytest.raises(CheckpointError, match="w has 4 elements, but the ranks wrote 2"):
        save_checkpoint(Save(tmp_path, 1, {}), [half], lambda ok: ok)
    assert find_checkpoint(str(tmp_path)) is None


def _agree(ok: bool) -> bool:
    flag = torch.tensor(int(ok))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _fail_on_one_rank(root: Path) -> None:
    rank, write_safetensors = dist.get_rank(), writer.write_safetensors
    for number, error in enumerate((OSError("no space"), SafetensorError("no space"), CheckpointError("no space"))):

        def fail(*args: object, error: Exception = error) -> StoredFile:
            if rank == 1:
                raise error
            return write_safetensors(*args)

        writer.write_safetensors = fail
        with pytest.raises(CheckpointError, match="write its tensors") as told:
            save_checkpoint(Save(root, number + 1, {}, rank=rank, ranks=2), [piece(1.0)], _agree)
        assert ("no space" in str(told.value)) == (rank == 1)
        assert find_checkpoint(str(root)) is None


def test_failure_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:  # C44
    run_ranks(2, _fail_on_one_rank, tmp_path)


NUMEL = 2**18


def _save_for_ever(root: Path) -> None:
    torch.set_num_threads(1)
    for iteration in range(1, 10**6):
        write(root, iteration, float(iteration), NUMEL)
        shutil.rmtree(root / f"iter_{iteration - 2:07d}", ignore_errors=True)


def test_killed_at_any_time_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:  # C44
    chance = random.Random(0)
    for attempt in range(4):
        root = tmp_path / str(attempt)
        process = multiprocessing.get_context("fork").Process(target=_save_for_ever, args=(root,))
        process.start()
        while not (root / "latest_checkpointed_iteration.txt").exists():
            time.sleep(0.001)
        time.sleep(0.1 * chance.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        folder = find_checkpoint(str(root))
        assert (read(folder, NUMEL) == int(folder.name.removeprefix("iter_"))).all()


def _resume_over_killed_save(root: Path) -> None:
    """All ranks of a job that died during a save resume from the previous checkpoint."""
    settings = ONE_LAYER | {"use_distributed_optimizer": True, "save": str(root)}
    run = start(settings)
    train(run, 1)
    folder = save_run(run)
    train(run, 1)
    publish, Save.publish = Save.publish, lambda save: (_ for _ in ()).throw(OSError("the machine stops"))
    with pytest.raises(CheckpointError, match="complete"):
        save_run(run)
    Save.publish = publish
    run = start(settings | {"load": str(root)})
    assert run.state.iteration == 1
    compare(run, stored(folder))
    train(run, 1)
    folder = save_run(run)
    compare(run, stored(folder))


def test_save_that_failed_can_be_made_again(tmp_path: Path) -> None:  # C57
    run_ranks(2, _resume_over_killed_save, tmp_path)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"global_batch_size": 8}, "global_batch_size was 4 and is 8"),
        ({"adam_beta1": 0.5, "clip_grad": 0.1}, "adam_beta1 was 0.9 and is 0.5; clip_grad was 1.0 and is 0.1"),
        ({"hidden_dropout": 0.3}, "hidden_dropout was 0.1 and is 0.3"),
        ({"fp64": False}, "fp64 was True and is False"),
        ({"seq_length_warmup": (4, 4, 64)}, "seq_length_warmup was None and is (4, 4, 64)"),
        ({}, None),
    ],
)
def test_settings_that_lead_to_other_numbers_are_named(
    other: dict, told: str | None, saved: Path, capsys: pytest.CaptureFixture
) -> None:
    start(ONE_LAYER | other | {"load": str(saved.parent)})
    shown = capsys.readouterr().out
    assert (f"note: results will differ from the resumed run: {told}\n" if told else "") in shown
    assert ("results will differ" in shown) == (told is not None)


def test_a_size_of_the_vocabulary_may_be_left_to_the_tokenizer() -> None:
    """A converted checkpoint has the number, the flags only the tokenizer."""
    config = tiny_config(vocab_size=None, tokenizer_type="ByteLevelTokenizer")
    assert differing_settings(config.flat() | {"vocab_size": 257}, config) == []
    assert differing_settings(config.flat() | {"clip_grad": 5.0, "vocab_size": 257}, config) == [
        "clip_grad was 5.0 and is 1.0"
    ]


def test_the_state_of_another_optimizer_is_not_taken(saved: Path) -> None:
    """Lion's running mean has the same name as Adam's."""
    with pytest.raises(CheckpointError, match=r"optimizer=lion, but .* has the state of --optimizer adam"):
        start(ONE_LAYER | {"optimizer": "lion", "load": str(saved.parent)})
    start(ONE_LAYER | {"optimizer": "lion", "no_load_optim": True, "load": str(saved.parent)})
