"""Ids of special tokens survive import, training and export; layers that an export leaves out are noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.hub.hugging_face import HuggingFaceReader, notes_of_folder, settings_of_folder
from megatron_core.hub.settings import TOKEN_ID_KEYS
from megatron_core.parallel import World
from megatron_core.training import read_settings
from megatron_core.training.setup import set_up
from tests.hub.hf_models import LLAMA, save_model
from tests.runs import tiny_run
from tests.vocabularies.corpus import write_tokenizer_json

IDS: dict[str, dict[str, Any]] = {
    "a list, a pad of its own and unk": {
        **{"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 7, "unk_token_id": 3},
    },
    "null": {"bos_token_id": None, "eos_token_id": 5, "pad_token_id": None},
    "absent": {},
    "minus one, as in early files": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": -1},
    "further names": {"eos_token_id": 2, "sep_token_id": 4, "mask_token_id": 5, "decoder_start_token_id": 6},
}


def ids_in(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "config.json").read_text())
    return {key: content[key] for key in TOKEN_ID_KEYS if key in content}


def model_with(ids: dict[str, Any], folder: Path, *, tokenizer: bool) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | {"vocab_size": 400})).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content = {key: value for key, value in content.items() if key not in TOKEN_ID_KEYS} | ids
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if tokenizer:
        write_tokenizer_json(folder, ("<|endoftext|>",))


def train(save: Path, *flags: str) -> None:
    """Save a run without a step."""
    config, _ = read_settings("x", [*flags, "--mock-data", "--train-iters", "1", "--seq-length", "16", "--lr", "0.1"])
    run = set_up(config, World(0, 1, 0, torch.device("cpu")))
    run.saver.save(run.state)
    run.saver.close()


@pytest.mark.every_case
@pytest.mark.parametrize("tokenizer", [True, False], ids=["tokenizer", "no tokenizer"])
@pytest.mark.parametrize("kind", IDS)
def test_exported_ids_are_those_of_the_imported_model(kind: str, tokenizer: bool, tmp_path: Path) -> None:
    model_with(IDS[kind], tmp_path / "theirs", tokenizer=tokenizer)
    import_hugging_face(tmp_path / "theirs", tmp_path / "native", verify=False)
    export_hugging_face(tmp_path / "native", tmp_path / "again", verify=False)
    assert ids_in(tmp_path / "again") == IDS[kind]
    ours, theirs = (transformers.AutoConfig.from_pretrained(tmp_path / name) for name in ("again", "theirs"))
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_ids_survive_training(tmp_path: Path) -> None:
    ids = IDS["a list, a pad of its own and unk"]
    model_with(ids, tmp_path / "theirs", tokenizer=True)
    import_hugging_face(tmp_path / "theirs", tmp_path / "native", verify=False)
    native = str(tmp_path / "native")
    train(tmp_path / "a", "--load", native, "--use-checkpoint-args", "--finetune", "--save", str(tmp_path / "a"))
    train(tmp_path / "b", "--load-hf", str(tmp_path / "theirs"), "--save", str(tmp_path / "b"))
    for name in ("a", "b"):
        export_hugging_face(tmp_path / name, tmp_path / f"{name} exported", verify=False)
        assert ids_in(tmp_path / f"{name} exported") == ids
    given = '{"eos_token_id": 9}'
    train(tmp_path / "c", "--load-hf", str(tmp_path / "theirs"), "--save", str(tmp_path / "c"), "--hf-token-ids", given)
    export_hugging_face(tmp_path / "c", tmp_path / "c exported", verify=False)
    assert ids_in(tmp_path / "c exported") == {"eos_token_id": 9}


def test_a_tokenizer_with_another_id_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_with({"bos_token_id": 1, "eos_token_id": [2, 7]}, tmp_path / "theirs", tokenizer=True)
    names = {"eos_token": "<|endoftext|>"}
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps(names))
    import_hugging_face(tmp_path / "theirs", tmp_path / "native", verify=False)
    capsys.readouterr()
    export_hugging_face(tmp_path / "native", tmp_path / "again", verify=False)
    assert "config.json has eos_token_id=[2, 7] of the imported model, the tokenizer has 0" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["2", 2.0, True, {"id": 2}, [2, "3"], [[2]], 2**40, -2, float("nan")], ids=repr)
def test_ids_of_another_type_are_refused(value: Any, tmp_path: Path) -> None:
    model_with({"eos_token_id": value}, tmp_path / "theirs", tokenizer=False)
    with pytest.raises(CheckpointError, match=r"eos_token_id=.*it must be a token's id from -1 to "):
        settings_of_folder(tmp_path / "theirs")
    given = RunConfig.from_flat({"mock_data": True, "hf_token_ids": json.dumps({"eos_token_id": value})})
    assert any(problem.startswith("hf_token_ids=") for problem in problems(given, 1))


def test_layers_with_names_of_their_own_are_noted(tmp_path: Path) -> None:
    save_model("qwen3_next", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(3, 5)}, tmp_path / "model.safetensors", {"format": "pt"})
    with HuggingFaceReader(tmp_path) as reader:
        (note,) = notes_of_folder(tmp_path, reader.model)
    assert "layers for multi-token prediction (1 tensors, 15 parameters), which are not read" in note


def test_left_out_layers_for_multi_token_prediction_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model("llama", tmp_path / "theirs")
    settings = settings_of_folder(tmp_path / "theirs") | {"mtp_num_layers": 2, "seq_length": 16}
    run = tiny_run(**settings, save=str(tmp_path / "ours"))
    run.saver.save(run.state)
    run.saver.close()
    capsys.readouterr()
    export_hugging_face(tmp_path / "ours", tmp_path / "exported", verify=False)
    text = capsys.readouterr().out
    weights = {name: p for name, p in run.stages[0].named_parameters() if name.startswith("mtp.")}
    parameters = sum(parameter.numel() for parameter in weights.values())
    assert f"mtp_num_layers=2: the export has no layers for multi-token prediction ({len(weights)} tensors, " in text
    assert f"{parameters:,} parameters)" in text
