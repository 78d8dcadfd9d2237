"""An architecture declared in a file outside of the package is imported, trained and exported like the others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face
from megatron_core.hub.hugging_face import HuggingFaceReader, architecture_of, register, settings_of_folder
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES, architecture_for
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.hub.hf_models import save_model
from tests.hub.invented_architecture import INVENTED
from tests.runs import TINY, tiny_run

NAMES = {
    "model.embed_tokens": "tokens",
    "model.norm": "norm",
    "lm_head": "scores",
    "input_layernorm": "norms.0",
    "post_attention_layernorm": "norms.1",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.in",
    "mlp.down_proj": "mlp.out",
}
KEYS = {
    "num_hidden_layers": "depth",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "channels_per_head",
    "intermediate_size": "inner_width",
    "rms_norm_eps": "epsilon",
    "max_position_embeddings": "context",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
}


def rename_qwen3(qwen3: Path, folder: Path) -> None:
    """Write a folder of Qwen3, which computes the same, with the names of the invented architecture."""
    stored, tensors = load_file(qwen3 / "model.safetensors"), {}
    for name, tensor in stored.items():
        module, _, parameter = name.rpartition(".")
        layer = module.split(".")[2] if module.startswith("model.layers.") else None
        inner = module.removeprefix(f"model.layers.{layer}.")
        prefix = "" if layer is None else f"blocks.{layer}."
        if inner in NAMES:
            tensors[f"{prefix}{NAMES[inner]}.{parameter}"] = tensor
        elif inner == "self_attn.q_proj":
            parts = [stored[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            tensors[f"{prefix}attention.in.weight"] = torch.cat(parts)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    theirs = json.loads((qwen3 / "config.json").read_text())
    config = {new: theirs[old] for old, new in KEYS.items()}
    config |= {"model_type": "invented", "base": theirs["rope_parameters"]["rope_theta"], "bias": False}
    (folder / "config.json").write_text(json.dumps(config))


def losses(folder: Path, layout: dict[str, Any], save: Path | None = None) -> list[float]:
    """Losses of two steps from the weights in ``folder``, which are saved before unchanged."""
    settings = TINY | settings_of_folder(folder) | {"seq_length": 16, "load_hf": str(folder)}
    run = tiny_run(**settings | layout | ({} if save is None else {"save": str(save)}))
    if save is not None:
        run.saver.save(run.state)
    return [train_step(run).loss for _ in range(2)]


def test_an_invented_architecture_comes_in_and_goes_out(tmp_path: Path) -> None:
    """In tp2 it trains like the same weights with Qwen3's names in one process, and is exported bytewise."""
    save_model("qwen3", tmp_path / "qwen3")
    rename_qwen3(tmp_path / "qwen3", tmp_path / "invented")
    expected = losses(tmp_path / "qwen3", {"fp64": True})
    layout = {"tensor_model_parallel_size": 2}
    for found in run_ranks(2, losses, tmp_path / "invented", layout | {"fp64": True}):
        assert found == pytest.approx(expected, rel=1e-9)
    run_ranks(2, losses, tmp_path / "invented", layout, tmp_path / "ours")
    export_hugging_face(tmp_path / "ours", tmp_path / "again", verify=False)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("invented", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config, again = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("invented", "again"))
    assert config.items() <= again.items()
    assert again["architectures"] == ["InventedForCausalLM"]


def test_the_checks_of_files_hold_for_it(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "qwen3")
    folder = tmp_path / "invented"
    rename_qwen3(tmp_path / "qwen3", folder)
    config = json.loads((folder / "config.json").read_text())
    faults: dict[str, tuple[dict[str, Any], str]] = {
        "type": ({"width": "32"}, "width='32'; it must be an integer from 1 to 16,777,216"),
        "type of a rule's key": ({"base": -1}, "base=-1; it must be a finite number above 0"),
        "missing": ({"depth": None}, "config.json has no depth; invented models need it"),
        "missing for a rule": ({"base": None}, "config.json has no base; invented models need it"),
        "unsupported": ({"bias": True}, "bias=True; for invented only False is supported"),
    }
    for changes, message in faults.values():
        with pytest.raises(CheckpointError, match=message):
            architecture_of(config | changes).settings(config | changes)
    for depth, message in ((5, "asks for 5 layers"), (3, r"unexpected: blocks\.3\.")):
        (folder / "config.json").write_text(json.dumps(config | {"depth": depth}))
        with pytest.raises(CheckpointError, match=message):
            HuggingFaceReader(folder)


def test_a_name_is_registered_once_and_settings_exist() -> None:
    with pytest.raises(ValueError, match="'invented' is registered already"):
        register(INVENTED)
    with pytest.raises(ValueError, match="other: ModelConfig has no settings number_of_norms"):
        register(INVENTED, model_type="other", fixed={"number_of_norms": 5})
    assert "other" not in ARCHITECTURES


@pytest.mark.parametrize("model_type", ["granite", "hyperclovax"])
def test_the_default_scale_of_scores_is_a_factor_of_granite(model_type: str) -> None:
    """A model trained here without --softmax-scale, which config.json always has."""
    placement = "sandwich" if model_type == "hyperclovax" else "pre"
    llama = {"normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True, "position_embedding_type": "rope"}
    config = RunConfig.from_flat(TINY | llama | {"norm_placement": placement, "norm_epsilon": 1e-6}).model
    assert architecture_for(config, model_type).config_json(config)["attention_multiplier"] == config.head_size**-0.5
    with pytest.raises(CheckpointError, match="softmax_scale="):
        architecture_for(replace(config, softmax_scale=0.5), "llama")


def test_numbers_of_the_declarations_are_numbers() -> None:
    """YAML reads 1e-5 as a string; 1.0e-5 is a number."""
    for architecture in ARCHITECTURES.values():
        for name in ("fixed", "defaults", "required", "layer_constants"):
            for key, value in getattr(architecture, name).items():
                assert not isinstance(value, str) or not re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", value), (key, value)
