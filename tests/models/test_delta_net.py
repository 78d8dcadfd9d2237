"""Models with gated delta nets against `transformers`, all of whose operations are in float64 here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hf_models import MODELS
from tests.models.test_gradients import compare_gradients

NAMES = [name for name in MODELS if name.startswith(("qwen3_next", "qwen3_5"))]
MODULES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


class WideTorch:
    """torch, with float64 for float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_theirs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for module in MODULES:
        monkeypatch.setattr(
            importlib.import_module(f"transformers.models.{module}.modeling_{module}"), "torch", WideTorch()
        )
    compare_gradients(name, tmp_path, tolerance=1e-10)
