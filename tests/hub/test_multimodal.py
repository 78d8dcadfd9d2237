"""The text model of a multimodal folder is imported with the logits that `transformers` computes from all parts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.hub.hugging_face import HuggingFaceReader, notes_of_folder, settings_of_folder
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES
from megatron_core.hub.hugging_face.text_part import TEXT_TYPES, text_names
from tests.hub.hf_models import DELTA_NET, GEMMA, GLM_MOE, LLAMA, LLAMA4, MINISTRAL3_YARN

TEXT = LLAMA | {"vocab_size": 80, "tie_word_embeddings": False}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"patch_size": 4, "image_size": 16}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
QWEN_VISION |= {"out_hidden_size": 32}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM_VISION = QWEN_VISION | {"image_size": 16}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
IMAGE = {"image_token_id": 77, "video_token_id": 78, "vision_start_token_id": 76, "vision_end_token_id": 75}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma3": (
        "Gemma3",
        {"text_config": GEMMA | {"vocab_size": 80}, "vision_config": VISION, "image_token_index": 77}
        | {"mm_tokens_per_image": 4, "boi_token_index": 75, "eoi_token_index": 76},
        "gemma3_text",
    ),
    "mistral3": (
        "Mistral3",
        {"text_config": TEXT | {"model_type": "mistral", "sliding_window": None, "head_dim": 16}}
        | {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 8}, "tie_word_embeddings": False},
        "mistral",
    ),
    "mistral3, Ministral 3": (
        "Mistral3",
        {"text_config": TEXT | {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL3_YARN}}
        | {"vision_config": VISION | {"model_type": "pixtral", "head_dim": 8}, "tie_word_embeddings": False},
        "ministral3",
    ),
    "llama4": (
        "Llama4",
        {"text_config": TEXT | LLAMA4, "image_token_index": 77}
        | {"vision_config": VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}},
        "llama4_text",
    ),
    "smolvlm": (
        "SmolVLM",
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION, "scale_factor": 2} | IMAGE,
        "llama",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"text_config": TEXT | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION} | IMAGE,
        "qwen2",
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"text_config": TEXT | {"rope_parameters": MROPE}}
        | {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}}
        | IMAGE,
        "qwen2",
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"text_config": TEXT | {"head_dim": 8, "rope_parameters": MROPE | {"mrope_interleaved": True}}}
        | {"vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}}
        | IMAGE,
        "qwen3",
    ),
    "qwen3_vl, experts": (
        "Qwen3VLMoe",
        {"text_config": TEXT | QWEN_EXPERTS | {"rope_parameters": MROPE | {"mrope_interleaved": True}}}
        | {"vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}}
        | IMAGE,
        "qwen3_moe",
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"text_config": TEXT | DELTA_NET, "vision_config": QWEN_VISION | {"num_position_embeddings": 16}} | IMAGE,
        "qwen3_5_text",
    ),
    "glm4v": (
        "Glm4v",
        {"text_config": TEXT | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}}}
        | {"vision_config": GLM_VISION}
        | IMAGE,
        "glm4",
    ),
    "glm4v, experts": (
        "Glm4vMoe",
        {
            "text_config": TEXT
            | GLM_MOE
            | {"head_dim": 16, "rope_parameters": MROPE | {"partial_rotary_factor": 0.5}, "router_aux_loss_coef": 0.0}
        }
        | {"vision_config": GLM_VISION}
        | IMAGE,
        "glm4_moe",
    ),
}
OLD_NAMES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
"""Names of releases from 4.52 on -> those of the files of the hub."""


def save(name: str, folder: Path) -> None:
    """Write one of ``MODELS`` with random weights."""
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    if kind == "Qwen3VLMoe":  # files of the hub have transposed matrices, which transformers reads and does not write
        tensors = load_file(folder / "model.safetensors")
        turned = {key: tensor.mT.contiguous() for key, tensor in tensors.items() if ".mlp.experts." in key}
        save_file(tensors | turned, folder / "model.safetensors", {"format": "pt"})


def renamed(folder: Path, prefixes: dict[str, str]) -> dict[str, torch.Tensor]:
    """Rename the stored tensors by prefix and return them under their new names."""
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        found[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("name", MODELS)
def test_the_text_model_has_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    """`transformers` computes them with all parts; the export is a folder of the text architecture alone."""
    save(name, tmp_path / "theirs")
    assert import_hugging_face(tmp_path / "theirs", tmp_path / "ours") < 5e-6
    assert export_hugging_face(tmp_path / "ours", tmp_path / "text") < 5e-6
    config = json.loads((tmp_path / "text/config.json").read_text())
    architecture = ARCHITECTURES[MODELS[name][2]]
    assert (config["model_type"], config["architectures"]) == (architecture.model_type, [architecture.class_name])
    stored, text = (load_file(tmp_path / each / "model.safetensors") for each in ("theirs", "text"))
    with HuggingFaceReader(tmp_path / "theirs") as reader:
        (note,) = notes_of_folder(tmp_path / "theirs", reader.model)
    assert f"only its text model is read, as {reader.architecture.model_type}; left out: " in note
    left = [tensor for key, tensor in stored.items() if key not in text_names(stored).values()]
    assert len(left) > 5
    for key, own in text_names(stored).items():
        if key in text:
            assert torch.equal(text[key], stored[own])
    assert sum(int(count.replace(",", "")) for count in _numbers(note, "tensors")) == len(left)
    assert sum(int(count.replace(",", "")) for count in _numbers(note, "parameters")) == sum(x.numel() for x in left)


def _numbers(note: str, unit: str) -> list[str]:
    words = note.replace("(", " ").replace(")", " ").split()
    return [before for before, word in pairwise(words) if word.rstrip(",") == unit]


@pytest.mark.every_case
@pytest.mark.parametrize("layout", ["hub", "new", "without the prefix"])
def test_names_of_every_release(layout: str, tmp_path: Path) -> None:
    """Of releases before and after 4.52, and of Qwen2.5-VL, whose files have no ``language_model``."""
    name = "qwen2_5_vl" if layout == "without the prefix" else "mistral3"
    save(name, tmp_path)
    to_new = {"language_model.lm_head.": "lm_head.", "language_model.model.": "model.language_model."}
    renamed(tmp_path, to_new | {"model.layers.": "model.language_model.layers."})
    if layout == "hub":
        names = renamed(tmp_path, OLD_NAMES)
        assert "language_model.model.layers.0.self_attn.q_proj.weight" in names
    elif layout == "new":
        names = load_file(tmp_path / "model.safetensors")
        assert "model.language_model.layers.0.self_attn.q_proj.weight" in names
    else:
        names = renamed(tmp_path, {"model.language_model.": "model.", "model.visual.": "visual."})
        config = json.loads((tmp_path / "config.json").read_text())
        flat = config.pop("text_config") | config | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
        (tmp_path / "config.json").write_text(json.dumps(flat | {"model_type": "qwen2_5_vl"}))
        assert "visual.blocks.0.norm1.weight" in names and "model.layers.0.self_attn.q_proj.weight" in names
    assert import_hugging_face(tmp_path, tmp_path / "ours") < 2e-6


def test_ties_that_no_key_states_follow_from_the_tensors(tmp_path: Path) -> None:
    """Mistral Small 3.1 stores an output layer, and neither part of its config.json has ``tie_word_embeddings``."""
    save("mistral3", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for each in (config, config["text_config"]):
        each.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(config))
    assert settings_of_folder(tmp_path)["untie_embeddings_and_output_weights"]
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
    assert not settings_of_folder(tmp_path)["untie_embeddings_and_output_weights"]


def test_an_unexpected_tensor_of_the_text_model_is_refused(tmp_path: Path) -> None:
    save("mistral3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight") and "language" in name)
    tensors[extra.replace("q_proj", "sinks")] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.self_attn\.sinks"):
        HuggingFaceReader(tmp_path)


GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
"""As published: its text_config relies on the defaults of its class."""


def test_keys_that_published_files_leave_out_are_defaults_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_4B))
    save_file({"language_model.model.norm.weight": torch.ones(2560)}, tmp_path / "model.safetensors", {"format": "pt"})
    found, theirs = settings_of_folder(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path).text_config
    assert found["vocab_size"] == theirs.vocab_size == 262208
    assert found["num_attention_heads"] == theirs.num_attention_heads
    assert found["num_query_groups"] == theirs.num_key_value_heads
    assert found["kv_channels"] == theirs.head_dim
    assert found["norm_epsilon"] == theirs.rms_norm_eps
    assert found["max_position_embeddings"] == theirs.max_position_embeddings
    assert not found["untie_embeddings_and_output_weights"]


def test_text_parts_have_supported_architectures() -> None:
    assert {architecture for architecture, _ in TEXT_TYPES.values()} <= ARCHITECTURES.keys()


def test_a_text_part_without_model_type_is_one_sentence(tmp_path: Path) -> None:
    save("mistral3", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["text_config"]["model_type"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="text_config has no model_type"):
        HuggingFaceReader(tmp_path)
