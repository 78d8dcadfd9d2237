"""Experts in MXFP4, as gpt-oss is published: values, parts of a rank, and logits are those of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.hub.hugging_face.quantized import Mxfp4Files, dequantized
from tests.hub.hf_models import MODELS, save_model

EXPERTS, OUTPUTS, BLOCKS = 4, 6, 3
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def packed(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks ``[*shape, 16]`` and scales ``shape``."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(119, 126, shape, generator=generator, dtype=torch.uint8)


def save_packed(folder: Path) -> None:
    """A small gpt-oss in bfloat16 whose experts are stored as on the hub."""
    kind, settings = MODELS["gpt_oss"]
    sizes = {"intermediate_size": 64, "hidden_size": 64}
    MODELS["packed"] = kind, settings | sizes
    try:
        save_model("packed", folder, torch.bfloat16)
    finally:
        del MODELS["packed"]
    weights = load_file(folder / "model.safetensors")
    for number, name in enumerate([name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]):
        experts, features, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = packed(experts, outputs, features // 32, seed=number)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTIZATION}))


def test_values_are_those_of_transformers() -> None:
    """All codes and all exponents that bfloat16 holds."""
    blocks, _ = packed(2, OUTPUTS, 40)
    scales = torch.arange(2 * OUTPUTS * 40).reshape(2, OUTPUTS, 40) % 240 + 5
    wanted = convert_moe_packed_tensors(blocks, scales.to(torch.uint8))
    assert torch.equal(dequantized(blocks, scales.to(torch.uint8)).transpose(1, 2), wanted)


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, 3), slice(None), slice(0, 6, 2)),
        (slice(0, 1), slice(5, 70), slice(1, 4)),
        (slice(0, 4), slice(32, 64)),
        (slice(2, 4), slice(40, 41), slice(5, 6)),
    ],
)
def test_a_part_is_read_like_the_whole(index: tuple[slice, ...], tmp_path: Path) -> None:
    blocks, scales = packed(EXPERTS, OUTPUTS, BLOCKS)
    save_file({"w_blocks": blocks, "w_scales": scales, "v": torch.ones(3)}, tmp_path / "model.safetensors")
    files = Mxfp4Files(tmp_path)
    assert files.names == {"w", "v"}
    assert files.shape("w") == (EXPERTS, 32 * BLOCKS, OUTPUTS) and files.dtype("w") == torch.bfloat16
    assert torch.equal(files.read("w", index), convert_moe_packed_tensors(blocks, scales)[index])
    assert torch.equal(files.read("v", (slice(1, 3),)), torch.ones(2))
    files.close()


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Also after export, which writes the experts in bfloat16 under their usual names."""
    save_packed(tmp_path / "theirs")
    assert import_hugging_face(tmp_path / "theirs", tmp_path / "ours") < 2e-6
    assert export_hugging_face(tmp_path / "ours", tmp_path / "again") < 2e-6
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    blocks, scales = packed(EXPERTS, OUTPUTS, BLOCKS)
    save_file({"w_blocks": blocks}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no w_scales"):
        Mxfp4Files(tmp_path)
    save_file({"w_blocks": blocks, "w_scales": scales[:, :3].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w_scales \[4, 3, 3\]; they must"):
        Mxfp4Files(tmp_path).shape("w")
