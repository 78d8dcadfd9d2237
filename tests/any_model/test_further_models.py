"""Further architectures of transformers with context, tensor and expert parallelism against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megatron_core.verify.ranks import run_ranks
from tests.any_model.models import Result, difference
from tests.any_model.split_models import FURTHER, train_with_engine, train_with_torch

CP2: dict[str, Any] = {"context_parallel_size": 2}
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, CP2),
    "ep2": (2, {"expert_model_parallel_size": 2, "zero_stage": 1}),
    "tp2 cp2 zero3": (8, {**CP2, "tensor_model_parallel_size": 2, "zero_stage": 3}),
    "pp2 cp2": (4, {**CP2, "pipeline_model_parallel_size": 2, "cp_comm_type": "a2a"}),
}
EXPERTS = ("ernie-4.5-moe", "qwen2-moe", "dots1")


@cache
def _reference(name: str) -> Result:
    return train_with_torch(name)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("name", "row"), [(name, row) for name in FURTHER for row in ROWS if row != "ep2" or name in EXPERTS]
)
def test_equals_transformers(name: str, row: str) -> None:
    ranks, settings = ROWS[row]
    for result in run_ranks(ranks, train_with_engine, name, "plain", settings):
        assert difference(result, _reference(name)) < 1e-9
