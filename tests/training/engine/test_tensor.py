"""Automatic tensor parallelism of models of the caller against torch alone in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megatron_core.verify.ranks import run_ranks
from tests.ops.checks import WHOLE_MATRIX
from tests.training.engine.models import Result, difference, train_with_engine, train_with_torch

TENSOR = {"tensor_model_parallel_size": 2}
ROWS: list[tuple[int, dict[str, Any]]] = [
    (2, TENSOR),
    (4, {**TENSOR, "zero_stage": 1}),
    (4, {**TENSOR, "zero_stage": 3}),
]
NAMES = ("gpt2", "llama", "qwen3", "mixtral", "bert", "vit")


@cache
def _reference(name: str) -> Result:
    return train_with_torch(name)


@pytest.mark.parametrize(
    ("name", "row"),
    [(n, r) for i, n in enumerate(NAMES) for r in (range(3) if WHOLE_MATRIX else (0, 1 + i % 2))],
)
def test_equals_torch(name: str, row: int) -> None:
    ranks, settings = ROWS[row]
    for result in run_ranks(ranks, _train, name, settings):
        assert difference(result, _reference(name)) < 1e-9


def _train(name: str, settings: dict[str, Any]) -> Result:
    return train_with_engine(name, **settings)
