"""Weights in FP8 with a scale for each block: values, parts of a rank, and logits are those of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_core.errors import CheckpointError
from megatron_core.hub.conversion import export_hugging_face, import_hugging_face
from megatron_core.hub.hugging_face.quantized import Fp8BlockFiles
from tests.hub.hf_models import MODELS, save_model

QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [8, 16],
}
LARGEST = 448.0
"""Largest number of float8_e4m3."""


def quantized(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``weight``, whose sizes need not be multiples of ``block``."""
    rows, columns = block
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max().float() / LARGEST
            codes[at] = (weight[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def value(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each element by the definition."""
    found = torch.zeros(codes.shape)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            found[i, j] = codes[i, j].float() * scales[i // block[0], j // block[1]]
    return found


SIZES: dict[str, dict[str, int]] = {
    "qwen3": {},
    "deepseek_v3": {"moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
}
"""Changed sizes: transformers reads blocks right only if they divide the weights."""


def save_quantized(name: str, folder: Path) -> None:
    """A small model whose linear layers, except the output layer, are stored in FP8."""
    kind, settings = MODELS[name]
    MODELS["quantized"] = kind, settings | SIZES[name]
    try:
        save_model("quantized", folder, torch.bfloat16)
    finally:
        del MODELS["quantized"]
    weights = load_file(folder / "model.safetensors")
    names = [each for each in weights if each.endswith("proj.weight")]
    assert names
    for each in names:
        weights[each], weights[f"{each}_scale_inv"] = quantized(weights[each], (8, 16))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": QUANTIZATION}))


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None)),
        (slice(3, 17),),
        (slice(0, 20, 3), slice(5, 40)),
        (slice(9, 10), slice(39, 40)),
    ],
)
def test_a_part_is_read_by_the_definition(index: tuple[slice, ...], tmp_path: Path) -> None:
    codes, scales = quantized(torch.randn(20, 40, generator=torch.Generator().manual_seed(1)), (8, 16))
    save_file({"w": codes, "w_scale_inv": scales, "v": torch.ones(3)}, tmp_path / "model.safetensors")
    files = Fp8BlockFiles(tmp_path, QUANTIZATION)
    assert files.names == {"w", "v"}
    assert files.shape("w") == (20, 40)
    assert files.dtype("w") == torch.float32
    assert torch.equal(files.read("w", index), value(codes, scales, (8, 16))[index])
    assert torch.equal(files.read("v", (slice(1, 3),)), torch.ones(2))
    files.close()


@pytest.mark.parametrize("name", SIZES)
def test_logits_are_those_of_the_values(name: str, tmp_path: Path) -> None:
    """Import, which compares logits with transformers, and export, which writes bfloat16."""
    save_quantized(name, tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    plain = {each: tensor for each, tensor in stored.items() if not each.endswith("_scale_inv")}
    for each in plain:
        if f"{each}_scale_inv" in stored:
            plain[each] = value(plain[each], stored[f"{each}_scale_inv"], (8, 16))
    assert import_hugging_face(tmp_path / "theirs", tmp_path / "ours") < 2e-6
    assert export_hugging_face(tmp_path / "ours", tmp_path / "again") < 2e-6
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == plain.keys()
    for each, tensor in plain.items():
        # Expert biases keep their float32, as in transformers.
        exact = each.endswith("e_score_correction_bias")
        assert torch.equal(written[each], tensor if exact else tensor.to(torch.bfloat16)), each
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_weights_without_their_scales_are_refused(tmp_path: Path) -> None:
    codes, scales = quantized(torch.randn(20, 40), (8, 16))
    path = tmp_path / "model.safetensors"
    save_file({"w_scale_inv": scales}, path)
    with pytest.raises(CheckpointError, match="has w_scale_inv without w;"):
        Fp8BlockFiles(tmp_path, QUANTIZATION)
    save_file({"w": codes, "w_scale_inv": scales[:2].contiguous()}, path)
    with pytest.raises(CheckpointError, match=r"w_scale_inv \[2, 3\], which is not one scale"):
        Fp8BlockFiles(tmp_path, QUANTIZATION).shape("w")
    save_file({"w": codes.float(), "w_scale_inv": scales}, path)
    with pytest.raises(CheckpointError, match="w has scales and the dtype F32"):
        Fp8BlockFiles(tmp_path, QUANTIZATION).dtype("w")


@pytest.mark.parametrize("change", [{"weight_block_size": None}, {"weight_block_size": [0, 16]}, {"fmt": "e5m2"}])
def test_other_formats_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="fp8 needs fmt='e4m3' and weight_block_size"):
        Fp8BlockFiles(tmp_path, QUANTIZATION | change)
