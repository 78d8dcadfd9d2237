"""Models whose layers differ in their sizes equal a composition of Llama's layers with these sizes."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatron_core.checkpoint import parameter_pieces
from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.hub.hugging_face import HuggingFaceReader
from megatron_core.models import GPTModel
from megatron_core.tensor_parallel import ModelParallelConfig
from tests.hub.hf_models import LLAMA, VOCABULARY

OFF = {"no_op": False, "replace_with_linear": False}
NO_OP, LINEAR = OFF | {"no_op": True}, OFF | {"replace_with_linear": True}
BLOCKS: list[dict[str, dict[str, Any]]] = [
    {"attention": OFF | {"n_heads_in_group": 2}, "ffn": OFF | {"ffn_mult": 20.0}},
    {"attention": NO_OP | {"n_heads_in_group": None}, "ffn": LINEAR | {"ffn_mult": None}},
    {"attention": LINEAR | {"n_heads_in_group": None}, "ffn": OFF | {"ffn_mult": 2.5}},
    {"attention": OFF | {"n_heads_in_group": 1}, "ffn": NO_OP | {"ffn_mult": None}},
    {"attention": NO_OP | {"n_heads_in_group": None}, "ffn": NO_OP | {"ffn_mult": None}},
]
WIDTHS = {20.0: 512, 2.5: 256}
"""2/3 of the factor times 32 channels, up to the next multiple of 256."""
SHAPE = LLAMA | {"num_hidden_layers": len(BLOCKS)}


class _Linear(nn.Module):
    """A linear layer under the name of Nemotron's files."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.Linear(size, size, bias=False))

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return getattr(self, self.name)(hidden_states)


class _Layer(nn.Module):
    """A layer of Llama with the parts of a block."""

    def __init__(self, config: LlamaConfig, number: int) -> None:
        super().__init__()
        attention, ffn = BLOCKS[number]["attention"], BLOCKS[number]["ffn"]
        own = deepcopy(config)
        own.num_key_value_heads = config.num_attention_heads // (attention["n_heads_in_group"] or 1)
        own.intermediate_size = WIDTHS.get(ffn["ffn_mult"], 1)
        whole = LlamaDecoderLayer(own, number)
        self.self_attn = self.mlp = None
        if not attention["no_op"]:
            linear = attention["replace_with_linear"]
            self.input_layernorm = whole.input_layernorm
            self.self_attn = _Linear("linear_attn", config.hidden_size) if linear else whole.self_attn
        if not ffn["no_op"]:
            self.post_attention_layernorm = whole.post_attention_layernorm
            self.mlp = _Linear("linear_mlp", config.hidden_size) if ffn["replace_with_linear"] else whole.mlp

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        x = hidden_states
        if self.self_attn is not None:
            attended = self.self_attn(hidden_states=self.input_layernorm(x), **context)
            x = x + (attended[0] if isinstance(attended, tuple) else attended)
        return x if self.mlp is None else x + self.mlp(self.post_attention_layernorm(x))


def _save_model(folder: Path) -> LlamaForCausalLM:
    """Save a random model as the files of Nemotron have it."""
    config = LlamaConfig(**SHAPE)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).double()
    model.model.layers = nn.ModuleList(_Layer(config, n) for n in range(len(BLOCKS))).double()
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    keys = config.to_dict() | {"model_type": "nemotron-nas", "architectures": ["DeciLMForCausalLM"]}
    keys |= {"block_configs": BLOCKS, "intermediate_size": None, "num_key_value_heads": None}
    (folder / "config.json").write_text(json.dumps(keys))
    return model


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def test_logits_and_gradients(tmp_path: Path) -> None:
    theirs = _save_model(tmp_path / "theirs")
    ids = torch.randint(1, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=ids[:, :-1]).logits
    _loss(expected, ids).backward()
    with HuggingFaceReader(tmp_path / "theirs") as reader:
        parallel = ModelParallelConfig(params_dtype=torch.float64)
        model, gradients = (GPTModel(reader.model, VOCABULARY, 64, parallel=parallel).eval() for _ in range(2))
        reader.fill(parameter_pieces(model.named_global_parameters()))
    logits = model(ids[:, :-1])
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)  # their rotary table is float32
    _loss(logits, ids).backward()
    save_file({name: p.grad for name, p in theirs.named_parameters()}, tmp_path / "theirs/model.safetensors")
    with HuggingFaceReader(tmp_path / "theirs") as reader:
        reader.fill(parameter_pieces(gradients.named_global_parameters()))
    for (name, own), their in zip(model.named_parameters(), gradients.parameters(), strict=True):
        torch.testing.assert_close(own.grad, their.data, rtol=1e-5, atol=1e-6, msg=name)


def test_there_and_back(tmp_path: Path) -> None:
    _save_model(tmp_path / "theirs")
    import_hugging_face(tmp_path / "theirs", tmp_path / "ours", verify=False)
    export_hugging_face(tmp_path / "ours", tmp_path / "again", verify=False)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    keys = json.loads((tmp_path / "again/config.json").read_text())
    assert (keys["model_type"], keys["architectures"]) == ("nemotron-nas", ["DeciLMForCausalLM"])
    with HuggingFaceReader(tmp_path / "theirs") as old, HuggingFaceReader(tmp_path / "again") as new:
        assert new.model == old.model


@pytest.mark.parametrize(
    ("part", "entry", "message"),
    [
        ("attention", {"n_heads_in_group": 3}, "n_heads_in_group=3, which must divide 4 heads"),
        ("ffn", {"ffn_mult": 2.5, "no_op": True}, "several of no_op, replace_with_linear and a size"),
        (
            "ffn",
            {"ffn_mult": 2.5, "sparsify": ["x"]},
            r"block_configs\[0\].ffn.sparsify=\['x'\], which is not supported",
        ),
    ],
)
def test_entries_that_are_not_supported(part: str, entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    _save_model(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    keys = json.loads(path.read_text())
    keys["block_configs"][0][part] = entry
    path.write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceReader(tmp_path / "theirs")
