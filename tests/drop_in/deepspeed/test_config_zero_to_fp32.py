"""DeepSpeed's functions for float32 weights read its checkpoints and those of this project."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.utils import (
    clone_tensors_for_torch_save,
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from megatron_core.errors import CheckpointError, ConfigError
from tests.any_model.test_deepspeed_checkpoints import engine_of
from tests.hub.deepspeed.network import Network
from tests.hub.deepspeed.test_reader import CHECKPOINTS, expected_of

FROZEN = {"frozen.weight", "frozen.bias"}


@pytest.mark.parametrize("name", ["stage2_bf16", "stage3_fp32"])
def test_weights_are_deepspeeds_own(name: str) -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / name)
    assert found.keys() == Network().state_dict().keys()
    for parameter, values in expected_of(name)["state"].items():
        if parameter != "third.weight":
            assert found[parameter].flatten().tolist() == values["fp32"]
    kept = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / name, "step3", exclude_frozen_parameters=True)
    assert kept.keys() == found.keys() - FROZEN
    network = load_state_dict_from_zero_checkpoint(Network(), CHECKPOINTS / name)
    assert torch.equal(network.first.weight, found["first.weight"])


def test_weights_of_this_projects_checkpoints(tmp_path: Path) -> None:
    engine = engine_of("bf16", 1, 0)
    engine.load_checkpoint(CHECKPOINTS / "stage2_bf16")
    engine.save_checkpoint(tmp_path / "global_step3")
    (tmp_path / "latest").write_text("global_step3")
    wanted = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / "stage2_bf16")
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert not FROZEN & get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True).keys()


def test_conversion_to_universal(tmp_path: Path) -> None:
    engine = engine_of("bf16", 1, 0)
    engine.load_checkpoint(CHECKPOINTS / "stage2_bf16")
    engine.save_checkpoint(tmp_path / "step3")
    folders = ["--input_folder", str(tmp_path / "step3"), "--output_folder", str(tmp_path / "step3_universal")]
    ds_to_universal.main(ds_to_universal.parse_arguments(folders))
    assert (tmp_path / "latest_universal").read_text() == "step3_universal"
    wanted = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / "stage2_bf16")
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "step3_universal")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    with pytest.raises(CheckpointError, match=r"output_folder=.*step3_universal cannot be written.*give a new folder"):
        ds_to_universal.main(ds_to_universal.parse_arguments(folders))
    for source, message in ((CHECKPOINTS / "stage2_bf16/step3", "DeepSpeed wrote"), (tmp_path / "a", "no such")):
        arguments = SimpleNamespace(input_folder=source, output_folder=tmp_path / "b")
        with pytest.raises(CheckpointError, match=f"input_folder={source}: .*{message}"):
            ds_to_universal.main(arguments)


def test_files(tmp_path: Path) -> None:
    wanted = get_fp32_state_dict_from_zero_checkpoint(CHECKPOINTS / "stage1_fp32")
    convert_zero_checkpoint_to_fp32_state_dict(CHECKPOINTS / "stage1_fp32", tmp_path / "a")
    found = torch.load(tmp_path / "a" / "pytorch_model.bin")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    folder = tmp_path / "b"
    convert_zero_checkpoint_to_state_dict(
        CHECKPOINTS / "stage1_fp32", folder, "bf16", max_shard_size=120, safe_serialization=True
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        assert torch.equal(load_file(folder / file)[name], wanted[name].bfloat16()), name
    assert set(index) == wanted.keys() - {"third.weight"}
    with pytest.raises(ConfigError, match="dtype='int8' must be one of bf16"):
        convert_zero_checkpoint_to_state_dict(CHECKPOINTS / "stage1_fp32", folder, "int8")


def test_names_of_files_and_copies() -> None:
    assert get_model_ckpt_name_for_rank("f", "01") == "f/mp_rank_01_model_states.pt"
    assert get_zero_ckpt_name_for_rank("f", 3, 0) == "f/zero_pp_rank_3_mp_rank_00_optim_states.pt"
    assert get_layer_ckpt_name_for_rank("f", "layer_02", 1) == "f/layer_02-model_01_model_states.pt"
    whole = torch.arange(6.0)
    item = {"a": [whole[:2]], "b": (whole, 3)}
    copy = clone_tensors_for_torch_save(item)
    assert copy["a"][0].untyped_storage().nbytes() == 8 and torch.equal(copy["b"][0], whole) and copy["b"][1] == 3


def test_tied_weights_have_all_their_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    deepspeed.initialize(model=model, config=config)[0].save_checkpoint(tmp_path)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == model.state_dict().keys()
    assert torch.equal(found["1.weight"], model[0].weight) and torch.equal(found["1.bias"], model[1].bias)
