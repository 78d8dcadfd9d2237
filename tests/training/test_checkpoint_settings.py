"""--use-checkpoint-args reads settings, tokenizer and weights from one checkpoint, the newest intact one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_core.checkpoint.folder import iteration_folder, track
from megatron_core.errors import CheckpointError
from megatron_core.parallel import World
from megatron_core.training import read_settings
from megatron_core.training.setup import Run, set_up
from megatron_core.verify.ranks import run_ranks, this_world
from tests.runs import tiny_run
from tests.vocabularies.corpus import write_tokenizer_json

FLAGS = ["--use-checkpoint-args", "--mock-data", "--train-iters", "4", "--lr", "0.01", "--finetune"]
FLAGS += ["--micro-batch-size", "2", "--global-batch-size", "8"]
TEXT = "t\nc\nt"


def keep(run: Run, root: Path, iteration: int) -> None:
    """Save ``run`` to its own folder, and move the checkpoint to ``root`` as the newest one there."""
    run.state.iteration = iteration
    run.saver.save(run.state)
    root.mkdir(exist_ok=True)
    iteration_folder(run.saver.folder, iteration).rename(iteration_folder(root, iteration))
    track(root, iteration)


def save(root: Path, tokenizer: Path, iteration: int, seq_length: int) -> Run:
    """A checkpoint whose weights are all ``iteration``."""
    settings = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer), "vocab_size": 400}
    shape = {"position_embedding_type": "rope", "seq_length": seq_length, "norm_epsilon": 10.0**-iteration}
    run = tiny_run(**settings, **shape, save=f"{root}{iteration}")
    for parameter in run.stages[0].parameters():
        parameter.data.fill_(iteration)
    keep(run, root, iteration)
    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 1 and 2, the second with another tokenizer, length and epsilon."""
    tmp_path = tmp_path_factory.mktemp("saved")
    first = write_tokenizer_json(tmp_path).rename(tmp_path / "tokenizer.json")
    content = json.loads(first.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["t"], vocabulary["c"] = vocabulary["c"], vocabulary["t"]
    (tmp_path / "other").mkdir()
    second = tmp_path / "other" / "tokenizer.json"
    second.write_text(json.dumps(content))
    runs = save(tmp_path / "save", first, 1, 16), save(tmp_path / "save", second, 2, 12)
    ids = [run.tokenizer.tokenize(TEXT) for run in runs]
    assert ids[0] != ids[1]
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    return tmp_path


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy of these checkpoints."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "save"


def resumed(root: Path, *flags: str) -> tuple[int, int, float, list[int]]:
    """Start a run from the checkpoint: weights, length, epsilon and token ids."""
    config, _ = read_settings("x", [*FLAGS, "--load", str(root), *flags])
    world = this_world() if torch.distributed.is_initialized() else World(0, 1, 0, torch.device("cpu"))
    run = set_up(config, world)
    (weight,) = run.stages[0].decoder.final_layernorm.weight.unique().tolist()
    return weight, run.config.data.seq_length, run.config.model.norm_epsilon, run.tokenizer.tokenize(TEXT)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def spoil_tokenizer(folder: Path) -> None:
    """Leave a readable tokenizer that gives other ids."""
    path = folder / "tokenizer" / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace('"t"', '"\x01"').replace('"a"', '"t"').replace('"\x01"', '"a"'))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "manifest": lambda folder: flip(folder / "manifest.json", 100),
    "empty manifest": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "tokenizer": spoil_tokenizer,
    "half a tokenizer": lambda folder: (folder / "tokenizer" / "tokenizer.json").write_text("{"),
    "no tokenizer": lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(),
    "tensors": lambda folder: flip(folder / "rank_00000.safetensors"),
    "half of the tensors": lambda folder: (folder / "rank_00000.safetensors").write_bytes(b"x"),
    "no tensors": lambda folder: (folder / "rank_00000.safetensors").unlink(),
}


def test_the_newest_is_taken(root: Path) -> None:
    _, ids = json.loads((root.parent / "ids.json").read_text())
    assert resumed(root) == (2, 12, 0.01, ids)
    assert resumed(root, "--seq-length", "8") == (2, 8, 0.01, ids), "flags override"


@pytest.mark.parametrize("what", DAMAGE)
def test_all_is_of_the_one_before_a_damaged_one(what: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids, _ = json.loads((root.parent / "ids.json").read_text())
    DAMAGE[what](root / "iter_0000002")
    assert resumed(root) == (1, 16, 0.1, ids)
    assert "skipped a damaged checkpoint" in capsys.readouterr().out
    assert resumed(root, "--seq-length", "8") == (1, 8, 0.1, ids), "flags override"


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_one_that_is_named_is_refused(what: str, root: Path) -> None:
    DAMAGE[what](root / "iter_0000002")
    with pytest.raises(CheckpointError, match="iter_0000002"):
        resumed(root, "--ckpt-step", "2")
    with pytest.raises(CheckpointError, match="iter_0000002"):
        resumed(root / "iter_0000002")


def test_a_checkpoint_for_a_fast_restart_is_one_of_them(root: Path, tmp_path: Path) -> None:
    """Its settings and its tokenizer come with its weights."""
    ids, _ = json.loads((tmp_path / "ids.json").read_text())
    shutil.copytree(root / "iter_0000001" / "tokenizer", tmp_path / "copy")
    save(root / "non_persistent", tmp_path / "copy" / "tokenizer.json", 3, 8)
    assert resumed(root) == (3, 8, 1e-3, ids)
    DAMAGE["tensors"](root / "non_persistent" / "iter_0000003")
    assert resumed(root)[:3] == (2, 12, 0.01)


def test_all_ranks_take_the_same(root: Path) -> None:
    ids, _ = json.loads((root.parent / "ids.json").read_text())
    DAMAGE["tensors"](root / "iter_0000002")
    assert run_ranks(2, resumed, root) == [(1, 16, 0.1, ids)] * 2


def test_the_schedule_is_of_the_checkpoint_that_is_loaded(tmp_path: Path) -> None:
    for iteration, lr in ((1, 0.5), (2, 0.25)):
        keep(tiny_run(save=str(tmp_path / f"run{iteration}"), lr=lr), tmp_path / "save", iteration)
    flip(tmp_path / "save" / "iter_0000002" / "rank_00000.safetensors")
    flags = [
        "--load",
        str(tmp_path / "save"),
        "--use-checkpoint-args",
        "--use-checkpoint-opt-param-scheduler",
        "--mock-data",
    ]
    flags += ["--vocab-size", "61", "--train-iters", "8", "--micro-batch-size", "2", "--global-batch-size", "8"]
    config, _ = read_settings("x", flags)
    run = set_up(config, World(0, 1, 0, torch.device("cpu")))
    assert (run.state.iteration, run.config.optimizer.lr) == (1, 0.5)
