"""All readers of checkpoints compare the hashes of files, and use an older intact checkpoint if necessary."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.core import dist_checkpointing
from megatron.core.transformer.module import MegatronModule
from megatron.training import checkpointing
from megatron_core.commands.inspect_checkpoint import InspectCheckpointFlags, inspect_checkpoint
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face
from megatron_core.tensor_parallel import ColumnParallelLinear, ModelParallelConfig
from megatron_core.training.compatibility import open_model
from tests.runs import tiny_run

ROTARY = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True}
TENSORS = "rank_00000.safetensors"


def flip_last_bit(path: Path) -> None:
    """Change a value of a tensor without changing names, shapes and sizes."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def save_twice(root: Path) -> Path:
    """Checkpoints of iterations 1 and 2 with different weights; returns the folder of the second."""
    run = tiny_run(**ROTARY, save=str(root))
    for iteration in (1, 2):
        run.state.iteration = iteration
        for parameter in run.stages[0].parameters():
            parameter.data.fill_(iteration)
        run.saver.save(run.state)
    return root / "iter_0000002"


def export(root: Path) -> object:
    export_hugging_face(root, root / "exported", verify=False)
    return load_file(root / "exported" / "model.safetensors")["model.norm.weight"][0].item()


def generate(root: Path) -> object:
    reader, _ = open_model(str(root))
    with reader:
        return reader.read("model.decoder.final_layernorm.weight")[0].item()


READERS: dict[str, Callable[[Path], object]] = {"conversion": export, "generation": generate}


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_is_not_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = save_twice(tmp_path)
    flip_last_bit(newest / TENSORS)
    assert READERS[name](tmp_path) == 1.0
    assert "skipped a damaged checkpoint" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=f"{TENSORS} is damaged: its hash differs"):
        READERS[name](newest)
    assert not (newest / "exported").exists()


def test_a_flipped_bit_is_no_difference(tmp_path: Path) -> None:
    newest = save_twice(tmp_path)
    flip_last_bit(newest / TENSORS)
    with pytest.raises(CheckpointError, match="its hash differs"):
        inspect_checkpoint(InspectCheckpointFlags(checkpoint=str(tmp_path / "iter_0000001"), diff=str(newest)))


class Model(MegatronModule):
    """A model of a user program."""

    def __init__(self, value: float) -> None:
        config = ModelParallelConfig(params_dtype=torch.float32)
        super().__init__(config)
        self.linear = ColumnParallelLinear(4, 4, config=config, init_method=torch.nn.init.zeros_, bias=False)
        self.linear.weight.data.fill_(value)


def test_programs_of_megatron_lm_read_no_flipped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("finetune", "no_load_optim", "no_save_optim", "exit_on_missing_checkpoint")
    args = Namespace(load=str(tmp_path), save=str(tmp_path), ckpt_step=None, **dict.fromkeys(names, False))
    args.consumed_train_samples = args.consumed_valid_samples = 0
    monkeypatch.setattr(checkpointing, "get_args", lambda: args)
    for iteration in (1, 2):
        args.consumed_train_samples = 10 * iteration
        checkpointing.save_checkpoint(iteration, [Model(iteration)], None, None, 0)
    model = Model(0.0)
    assert checkpointing.load_checkpoint([model], None, None) == (2, 0)
    assert model.linear.weight.unique().tolist() == [2.0]
    flip_last_bit(tmp_path / "iter_0000002" / TENSORS)
    assert checkpointing.load_checkpoint([model], None, None) == (1, 0)
    assert model.linear.weight.unique().tolist() == [1.0] and args.consumed_train_samples == 10
    args.ckpt_step = 2
    with pytest.raises(CheckpointError, match="its hash differs"):
        checkpointing.load_checkpoint([model], None, None)
    state = {"model0": model.sharded_state_dict()}
    with pytest.raises(CheckpointError, match="its hash differs"):
        dist_checkpointing.load(state, tmp_path / "iter_0000002")
