"""The table of fast paths, with stubs of platforms and with the installed torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.features.experts import grouped
from megatron_core.features.flex_attention import kernels
from megatron_core.reports.fast_paths import FAST_PATHS, Platform, describe_paths, disabled_paths
from tests.runs import tiny_run
from tests.simulated_gpu.runtime import simulated_gpu

ROOT = Path(__file__).parents[2]
HOPPER = Platform(
    torch="2.13.0+cu130",
    cuda="13.0",
    capability=(9, 0),
    has_triton=True,
    has_grouped_products=True,
    has_varlen=True,
    native=None,
)
"""The container's torch on an H100 or H200."""
EVERYTHING = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 96, "bf16": True,
    "mock_data": True, "micro_batch_size": 1, "global_batch_size": 1, "num_experts": 4, "moe_ffn_hidden_size": 64,
    "swiglu": True, "disable_bias_linear": True, "tokenizer_type": "NullTokenizer", "reset_position_ids": True,
    "reset_attention_mask": True, "window_size": (7, 0), "fp8_format": "hybrid", "fp8_recipe": "blockwise",
}  # fmt: skip
"""A run that needs all but two recipes of FP8."""


def names_off(platform: Platform, **settings: object) -> list[str]:
    """The names of the paths in the notes of a run."""
    notes = disabled_paths(RunConfig.from_flat(EVERYTHING | settings), platform)
    return [note.split(": ")[1] for note in notes]


def test_the_container_has_every_path_of_its_gpu() -> None:
    assert names_off(HOPPER) == []
    off = [line for line in describe_paths(HOPPER) if not line.endswith(": on")]
    assert len(off) == 1 and "32 elements" in off[0] and "10.0 and later" in off[0], "only Blackwell has that product"
    assert names_off(replace(HOPPER, capability=(10, 0)), fp8_recipe="mxfp8") == []
    dockerfile = (ROOT / "Dockerfile").read_text()
    [version] = re.findall(r"--no-cache-dir torch==(\S+)", dockerfile)
    [cuda] = re.findall(r"assert torch.version.cuda == '(\S+)'", dockerfile)
    assert f"{version}+cu{cuda.replace('.', '')}" == HOPPER.torch


def test_an_older_torch_names_what_is_off_and_the_version_that_has_it() -> None:
    old = replace(HOPPER, torch="2.8.0+cu128", cuda="12.8", has_grouped_products=False, has_varlen=False)
    old = replace(old, has_triton=False, native="libmegatron_cuda.so was not built")
    assert names_off(old) == [path.name for path in FAST_PATHS if path.is_needed(RunConfig.from_flat(EVERYTHING))]
    notes = list(disabled_paths(RunConfig.from_flat(EVERYTHING), old))
    assert notes[1] == (
        "fast path off: weight gradients added to float32 in one product: torch 2.8.0+cu128 does not have it; use 2.10 "
        "or later; instead a product and an addition, one more pass over each gradient"
    )
    assert "use 2.11 or later" in notes[3] and "use 2.10 or later" in notes[5]
    assert "libmegatron_cuda.so was not built" in notes[0]
    between = replace(HOPPER, torch="2.12.0+cu128", cuda="12.8")
    [note] = disabled_paths(RunConfig.from_flat(EVERYTHING), between)
    assert "built with CUDA 12.8, but this product needs 12.9" in note


def test_a_run_names_only_paths_that_it_needs() -> None:
    nothing = replace(HOPPER, torch="2.8.0", has_grouped_products=False, has_varlen=False, has_triton=False)
    plain = {name: None for name in ("num_experts", "moe_ffn_hidden_size", "window_size", "fp8_format")}
    plain |= {"reset_attention_mask": False, "fp8_recipe": "delayed"}
    assert names_off(nothing, **plain) == ["weight gradients added to float32 in one product"]
    assert names_off(nothing, **plain, bf16=False) == []


def test_the_installed_torch() -> None:
    """The table agrees with the code that chooses the path."""
    installed = Platform.current()
    assert installed.torch == torch.__version__
    off = {line.split(": ")[0] for line in describe_paths(installed) if not line.endswith(": on")}
    assert ("one product for all experts" in off) == (grouped._grouped_mm is None)
    assert ("variable-length attention of packed documents" in off) == (kernels.varlen_operator() is None)
    if not torch.cuda.is_available():
        assert "native CUDA kernels" in off
        assert sum("FP8" in name for name in off) >= 2


def test_a_run_prints_the_notes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu():
        run = tiny_run(bf16=True)
        monkeypatch.setattr(run.world, "device", torch.device("cuda", 0))
        notes = [note for part in run.parts for note in part.notes()]
    assert any(note.startswith("fast path off: native CUDA kernels: ") for note in notes), notes
