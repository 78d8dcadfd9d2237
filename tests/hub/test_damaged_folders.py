"""Incomplete and damaged folders of Hugging Face are refused in one sentence by all programs that open them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import import_hugging_face
from megatron_core.hub.hugging_face import HuggingFaceReader, architecture_of, settings_of_folder
from megatron_core.training.compatibility import open_model
from tests.hub.hf_models import MODELS, save_model, transformers
from tests.runs import TINY, tiny_run

OPENERS: dict[str, Callable[[Path], Any]] = {
    "converter": lambda folder: import_hugging_face(folder, folder / "native", verify=False),
    "generation": lambda folder: open_model(str(folder)),
    "training": lambda folder: tiny_run(**TINY | settings_of_folder(folder) | {"load_hf": str(folder)}),
}
PROJECTION = "model.layers.1.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | change(tensors), folder / "model.safetensors")


def last_row_changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1
    return {HEAD: head}


INCOMPLETE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "fewer layers in config.json": (
        "llama",
        lambda f: edit_config(f, num_hidden_layers=2),
        r"unexpected: model\.layers\.2\.",
    ),
    "fewer layers, called layers of multi-token prediction": (
        "llama",
        lambda f: edit_config(f, num_hidden_layers=2, num_nextn_predict_layers=2),
        r"unexpected: model\.layers\.2\.",
    ),
    "fewer layers of DeepSeek, called layers of multi-token prediction": (
        "deepseek_v3",
        lambda f: edit_config(f, num_hidden_layers=2, num_nextn_predict_layers=2, num_mtp_layers=None),
        r"unexpected: model\.layers\.2\.",
    ),
    "more layers in config.json": (
        "llama",
        lambda f: edit_config(f, num_hidden_layers=65_536),
        "asks for 65536 layers, and the files have no tensor of the last one",
    ),
    "more layers, of which each is two of ours": (
        "bamba",
        lambda f: edit_config(f, num_hidden_layers=64),
        "asks for 64 layers, and the files have no tensor of the last one",
    ),
    "more experts in config.json": (
        "mixtral",
        lambda f: edit_config(f, num_local_experts=65_536),
        "asks for 65536 experts, and the files have no tensor of the last one",
    ),
    "fewer experts in config.json": (
        "mixtral",
        lambda f: edit_config(f, num_local_experts=3),
        r"unexpected: model\.layers\.0\..*experts",
    ),
    "an unknown bias": (
        "llama",
        lambda f: edit_tensors(f, lambda _: {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias",
    ),
    "a mask that only GPT-2 has": (
        "llama",
        lambda f: edit_tensors(f, lambda _: {"model.layers.0.attn.bias": torch.ones(32)}),
        r"unexpected: model\.layers\.0\.attn\.bias",
    ),
    "another output layer": ("llama, tied", lambda f: edit_tensors(f, last_row_changed), "differs from the embedding"),
    "a smaller output layer": (
        "llama, tied",
        lambda f: edit_tensors(f, lambda tensors: {HEAD: tensors[EMBEDDING][:60].clone()}),
        "differs from the embedding",
    ),
    **{
        f"{dtype} in place of weights": (
            "llama",
            lambda f, dtype=dtype: edit_tensors(f, lambda tensors: {PROJECTION: tensors[PROJECTION].to(dtype)}),
            rf"{PROJECTION} has the dtype \w+; weights must be F64, F32, BF16, F16\. Save the model",
        )
        for dtype in (torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn)
    },
}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("fault", INCOMPLETE)
def test_what_does_not_hold_exactly_the_model_is_refused(fault: str, opener: str, tmp_path: Path) -> None:
    name, spoil, message = INCOMPLETE[fault]
    save_model(name, tmp_path)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        OPENERS[opener](tmp_path)


def test_tensors_that_old_releases_stored_are_not_needed(tmp_path: Path) -> None:
    save_model("gpt2", tmp_path / "gpt2")
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "transformer.h.0.attn.masked_bias": torch.ones(())}
    edit_tensors(tmp_path / "gpt2", lambda _: masks)
    HuggingFaceReader(tmp_path / "gpt2").__exit__()
    save_model("llama", tmp_path / "llama")
    edit_tensors(tmp_path / "llama", lambda _: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    HuggingFaceReader(tmp_path / "llama").__exit__()


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda f: rewrite(f, lambda data: b""), "cannot be read"),
    "cut in the header": (lambda f: rewrite(f, lambda data: data[:100]), "cannot be read"),
    "cut in the tensors": (lambda f: rewrite(f, lambda data: data[:-1]), "cannot be read"),
    "longer": (lambda f: rewrite(f, lambda data: data + b"x"), "cannot be read"),
    "header beyond the file": (lambda f: rewrite(f, lambda data: (2**40).to_bytes(8, "little") + data[8:]), "be read"),
    "header of 2**64 bytes": (lambda f: rewrite(f, lambda data: b"\xff" * 8 + data[8:]), "cannot be read"),
    "overlapping tensors": (
        lambda f: edit_header(f, lambda h: h["model.norm.weight"].update(data_offsets=[0, 128])),
        "be read",
    ),
    "a shape of other bytes": (lambda f: edit_header(f, lambda h: h[HEAD].update(shape=[1])), "cannot be read"),
    "an unknown dtype": (lambda f: edit_header(f, lambda h: h[HEAD].update(dtype="X")), "cannot be read"),
    "a dtype of other bytes": (lambda f: edit_header(f, lambda h: h[HEAD].update(dtype="F16")), "cannot be read"),
    "integers": (lambda f: edit_header(f, lambda h: h[HEAD].update(dtype="I32")), "has the dtype I32"),
}


@pytest.mark.parametrize("fault", FILES)
def test_damaged_safetensors_are_one_sentence(fault: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    spoil, message = FILES[fault]
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        HuggingFaceReader(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, [], [["a", "b"]], 1, 1.5, "x", True])
def test_a_weight_map_must_be_an_object(value: object, tmp_path: Path) -> None:
    save_model("llama", tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    with pytest.raises(CheckpointError, match=r"weight_map=.*; it must be an object;|has no weight_map"):
        HuggingFaceReader(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "names None for"),
        (3, "names 3 for"),
        ({}, "names {} for"),
        ("", "not in the same folder"),
        ("..", "not in the same folder"),
        ("../other.safetensors", "not in the same folder"),
        ("/etc/passwd", "not in the same folder"),
        ("nowhere.safetensors", "cannot be read"),
        ("config.json", "cannot be read"),
        ("\0", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        (
            "model-00001-of-00008.safetensors",
            "names model-00001-of-00008.safetensors for lm_head.weight, but the file does",
        ),
    ],
)
def test_files_of_an_index_are_checked(file: object, message: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceReader(tmp_path)


def test_a_tensor_that_the_index_leaves_out_is_not_lost(tmp_path: Path) -> None:
    """It is read if the model has it, and refused if not."""
    save_model("llama", tmp_path, max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop(PROJECTION)
    path.write_text(json.dumps(index))
    HuggingFaceReader(tmp_path).__exit__()
    save_file(load_file(tmp_path / file) | {"extra": torch.ones(1)}, tmp_path / file)
    with pytest.raises(CheckpointError, match="unexpected: extra"):
        HuggingFaceReader(tmp_path)


WRONG: dict[str, list[object]] = {
    "hidden_size": ["32", 1.5, -1, 0, 10**30, 2**31 - 1, [32], {}, True, float("nan")],
    "num_hidden_layers": ["4", 4.5, -4, 0, 10**30, [], False],
    "vocab_size": ["61", 61.5, -61, 0, 2**31 - 1, [61], True, None],
    "num_attention_heads": ["4", 0, -1, 1.5, [], 2**31],
    "num_key_value_heads": ["2", 0, -1, 1.5, []],
    "intermediate_size": ["48", 0, -1, 1.5, [], None, 10**30],
    "max_position_embeddings": ["64", 0, -1, 64.5, [], 2**31],
    "head_dim": ["8", 0, -1, 1.5, []],
    "rms_norm_eps": ["x", -1e-5, 0, [], True, float("nan"), float("inf"), 10**400, None],
    "rope_theta": ["x", -1, 0, [], {}, float("nan"), float("inf"), True],
    "rope_parameters": ["x", [], 1, {"rope_theta": "x"}, {"factor": []}, {"rope_type": 1}, {"rope_type": ["linear"]}],
    "rope_scaling": ["x", [1], 1.0, {"rope_type": "linear", "factor": "x"}, {"rope_type": "linear", "factor": -1}],
    "tie_word_embeddings": ["false", 0, 1, [], {}],
    "attention_dropout": ["x", -1, [], 1.5, float("nan")],
    "initializer_range": ["x", -1, [], float("inf")],
    "attention_bias": ["x", 1, []],
    "hidden_act": [1, [], {}, ["silu"]],
    "model_type": [1, None, [], {}, "x"],
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_types_and_ranges_are_one_sentence_with_the_key(key: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {k: v for k, v in json.loads((tmp_path / "config.json").read_text()).items() if k != "rope_parameters"}
        )
    )
    config = (tmp_path / "config.json").read_text()
    for value in WRONG[key]:
        edit_config(tmp_path, **{key: value})
        with pytest.raises(CheckpointError) as caught:
            HuggingFaceReader(tmp_path)
        message = str(caught.value)
        assert "config.json" in message and "\n" not in message and len(message) < 1000
        assert key in message or "norm_epsilon" in message or "layers" in message or "shape" in message, message
        (tmp_path / "config.json").write_text(config)


ODD = ["x", -1, 0, 1.5, float("nan"), 10**400, None, [], [[1]], {}, {"a": 1}, True]


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3, yarn", "qwen2, window in some layers", "gpt_neox", "mixtral"])
def test_any_value_of_any_key_is_read_or_refused(name: str) -> None:
    """No other kind of error is raised."""
    kind, settings = MODELS[name]
    theirs = json.loads(getattr(transformers, f"{kind}Config")(**settings).to_json_string(use_diff=False))
    refused = 0
    for key in theirs:
        for value in ODD:
            changed = theirs | {key: value}
            try:
                architecture_of(changed).settings(changed)
            except CheckpointError:
                refused += 1
    assert refused > 100
