"""Evaluation only: with the settings of a checkpoint, without gradients and moments, and with training's results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.parallel import World
from megatron_core.training import pretrain, read_settings
from tests.runs import TINY, tiny_run

MODEL = {"position_embedding_type": "rope", "norm_epsilon": 1e-4, "tokenizer_type": "NullTokenizer", "vocab_size": 59}
EVALUATE = ["--use-checkpoint-args", "--skip-train", "--eval-iters", "3", "--lr", "0", "--mock-data"]
BATCHES = ["--micro-batch-size", "2", "--global-batch-size", "8"]


def losses(folder: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["split"]: line["loss"] for line in lines if line["kind"] == "validation"}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    settings = TINY | MODEL | {"train_iters": 2, "eval_iters": 3, "save": str(tmp_path / "trained")}
    pretrain(RunConfig.from_flat(settings), World(0, 1, 0, torch.device("cpu")))
    return tmp_path / "trained"


def test_evaluation_of_a_checkpoint(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses of training, with flags that do not describe the model."""
    flags = ["--load", str(trained), "--save", str(tmp_path / "again"), *EVALUATE, *BATCHES]
    config, _ = read_settings("pretrain_gpt.py", flags)
    assert list(problems(config, 1)) == []
    assert (config.model.hidden_size, config.data.vocab_size, config.data.seq_length) == (32, 59, 16)
    pretrain(config, World(0, 1, 0, torch.device("cpu")))
    found = losses(tmp_path / "again")
    assert found.keys() == {"validation", "test"} and found == losses(trained)
    assert not (tmp_path / "again" / "config.yaml").exists() and "nothing to train" not in capsys.readouterr().out


def test_flags_override_the_checkpoint(trained: Path, tmp_path: Path) -> None:
    """A model that differs from the checkpoint's is refused as usual."""
    file = tmp_path / "settings.yaml"
    file.write_text("seq_length: 8\n")
    flags = ["--load", str(trained), *EVALUATE, *BATCHES, "--config", str(file), "--rotary-base", "5"]
    config, _ = read_settings("pretrain_gpt.py", flags)
    assert (config.data.seq_length, config.model.rotary_base, config.model.norm_epsilon) == (8, 5.0, 1e-4)
    with pytest.raises(CheckpointError, match=r"rotary_base=5\.0, but the checkpoint"):
        pretrain(config, World(0, 1, 0, torch.device("cpu")))
    with pytest.raises(ConfigError, match="use_checkpoint_args=True: load='nowhere' holds no checkpoint"):
        read_settings("pretrain_gpt.py", ["--use-checkpoint-args", "--load", "nowhere"])


def test_nothing_is_kept_for_training() -> None:
    run = tiny_run(skip_train=True, train_iters=None)
    assert run.data_parallel.buckets == [] and list(run.optimizer.tensors()) == []


def test_held_out_data_alone_is_enough() -> None:
    flags = TINY | {"mock_data": False, "train_iters": None, "skip_train": True}
    assert list(problems(RunConfig.from_flat(flags | {"valid_data_path": ("a",)}), 1)) == []
    assert "leaves the run without data" in next(problems(RunConfig.from_flat(flags), 1))
