"""Checkpoints of DeepSpeed as checkpoints of an engine and as weights of Hugging Face."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_core.commands.convert_checkpoint import ConvertFlags, convert_checkpoint
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.hub.deepspeed import read_deepspeed_checkpoint
from tests.any_model.test_deepspeed_checkpoints import CHECKPOINTS, TOLERANCE, continued, expected_of
from tests.hub.hf_models import save_model, transformers
from tests.programs import run_program

run_tool = partial(run_program, "tools/convert_checkpoint.py")


@pytest.mark.parametrize("name", ["stage1_bf16", "stage2_fp16", "stage3_fp32_universal"])
def test_a_converted_checkpoint_continues_as_the_original(name: str, tmp_path: Path) -> None:
    settings = ConvertFlags(source="deepspeed", to="native", load=str(CHECKPOINTS / name), save=str(tmp_path / "own"))
    assert convert_checkpoint(settings).endswith("(native); weights and optimizer state of global step 3")
    dtype = name.split("_")[1]
    losses = continued(tmp_path / "own", dtype, 0, 1)
    assert losses == continued(CHECKPOINTS / name, dtype, 0, 1)
    assert losses == pytest.approx(expected_of(CHECKPOINTS / name.removesuffix("_universal")), rel=TOLERANCE[dtype])


def test_flags(tmp_path: Path) -> None:
    load, save = str(CHECKPOINTS / "stage0_fp32"), str(tmp_path / "own")
    settings = {"source": "deepspeed", "load": load, "save": save}
    with pytest.raises(CheckpointError, match="stores the optimizer's state by numbers"):
        convert_checkpoint(ConvertFlags(to="native", optimizer=True, **settings))
    assert "weights without optimizer state" in convert_checkpoint(ConvertFlags(to="native", **settings))
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        convert_checkpoint(ConvertFlags(to="native", **settings))
    with pytest.raises(ConfigError, match=r"--ckpt-step has no effect with --from deepspeed .*give --tag"):
        convert_checkpoint(ConvertFlags(to="native", ckpt_step=3, **settings))
    with pytest.raises(CheckpointError, match=r"config.json does not exist; give the model's config.json with --hf-"):
        convert_checkpoint(ConvertFlags(to="hf", **settings | {"save": str(tmp_path / "hf")}))
    with pytest.raises(ConfigError, match=r"--tag has no effect with --from native .*only with --from deepspeed"):
        convert_checkpoint(ConvertFlags(source="native", to="hf", load=load, save=save, tag="step3"))


def save_deepspeed(model: torch.nn.Module, folder: Path) -> None:
    """A checkpoint as DeepSpeed writes it without ZeRO and without an optimizer."""
    (folder / "global_step5").mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    content = {"module": model.state_dict(), "buffer_names": [n for n, _ in model.named_buffers()], "optimizer": None}
    content |= {"param_shapes": None, "global_steps": 5, "global_samples": 40, "skipped_steps": 0}
    torch.save(content, folder / "global_step5" / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_of_hugging_face(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    save_deepspeed(model, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())  # as Trainer does
    flags = ("--from", "deepspeed", "--to", "hf", "--load", str(tmp_path / "run"), "--save", str(tmp_path / "hf"))
    done = run_tool(*flags)
    assert done.returncode == 0, done.stderr
    assert "tensors of global step 5" in done.stdout
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for (key, tensor), (other, value) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert key == other and torch.equal(tensor, value)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    settings["num_hidden_layers" if name == "llama" else "n_layer"] = 1
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"does not have the tensors of .* unexpected"):
        convert_checkpoint(
            ConvertFlags(source="deepspeed", to="hf", load=str(tmp_path / "run"), save=str(tmp_path / "other"))
        )
    assert not (tmp_path / "other").exists()
    assert read_deepspeed_checkpoint(tmp_path / "run").optimizer_steps == 5
