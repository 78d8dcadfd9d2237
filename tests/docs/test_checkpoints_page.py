"""docs/checkpoints.md is correct: its program reads checkpoints, its tables have every flag, key and file."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_core.checkpoint import manifest
from megatron_core.config import CheckpointConfig
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import save_run, start, stored, train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
SPLIT = {"num_layers": 2, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


@pytest.fixture
def program() -> dict:
    """The definitions of the page's Python code."""
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert "megatron" not in text and len([line for line in text.splitlines() if line]) <= 24
    names: dict = {}
    exec(text, names)
    return names


def _save(settings: dict, root: Path) -> None:
    run = start(SPLIT | settings | {"save": str(root)})
    train(run, 1)
    save_run(run)


@pytest.mark.parametrize("dtype", [{}, {"fp64": False, "bf16": True}])
def test_anyones_python_reads_a_checkpoint(dtype: dict, program: dict, tmp_path: Path) -> None:
    run_ranks(4, _save, dtype, tmp_path)
    folder = tmp_path / "iter_0000001"
    content, tensors = program["read_checkpoint"](folder)
    expected = stored(folder)
    assert content["iteration"] == 1 and tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        bits = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
        assert np.array_equal(tensors[name], bits), name
    for key in json.loads((folder / "manifest.json").read_text()):
        assert f"`{key}`" in PAGE, key
    file = folder / "rank_00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(AssertionError, match="is damaged"):
        program["read_checkpoint"](folder)


def test_every_flag_and_dtype_is_named() -> None:
    for field in fields(CheckpointConfig):
        flag = "--" + ("no-" if field.default is True else "") + field.name.replace("_", "-")
        assert re.search(rf"`{flag}\b", PAGE), flag
    assert all(f"`{dtype}`" in PAGE for dtype in manifest.TORCH_DTYPES)
    assert f"`{manifest.FORMAT}`, {manifest.VERSION}" in PAGE
    for told in re.findall(r"`([A-Z]{1,2} [A-Z ]{10,})`", PAGE):
        sources = (path.read_text() for path in (ROOT / "megatron_core").rglob("*.py"))
        assert any(told in source for source in sources), told
