"""Models of the caller in every ZeRO stage against torch alone in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megatron_core.verify.ranks import run_ranks
from tests.ops.checks import WHOLE_MATRIX
from tests.training.engine.models import MODELS, Result, difference, train_with_engine, train_with_torch

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 500}
ROWS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, {"zero_stage": 1}),
    (2, {"zero_stage": 2, "overlap_grad_reduce": True}),
    (2, {"zero_stage": 3}),
    (4, {"zero_stage": 3, **OVERLAPS}),
    (4, {"zero_stage": 1, **OVERLAPS}),
    (4, {"zero_stage": 3, "zero3_keep_after_forward": True, "num_distributed_optimizer_instances": 2}),
]
IN_MAKE_TEST = {
    "tangled": ROWS,
    "convolutions": [ROWS[0], ROWS[4]],
    "gpt2": [ROWS[2], ROWS[5]],
    "mixtral": [ROWS[3], ROWS[7]],
    **{name: [ROWS[5]] for name in ("llama", "qwen3", "vit", "bert")},
}
"""Each model and each row at least once; ``make verify-all`` runs every pair."""


@cache
def _reference(name: str) -> Result:
    return train_with_torch(name)


@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [(name, *row) for name in MODELS for row in (ROWS if WHOLE_MATRIX else IN_MAKE_TEST[name])],
    ids=lambda value: (
        value if isinstance(value, str | int) else "-".join(f"{k}={v}" for k, v in value.items()) or "plain"
    ),
)
def test_equals_torch(name: str, ranks: int, settings: dict[str, Any]) -> None:
    found = [train_with_engine(name, **settings)] if ranks == 1 else run_ranks(ranks, _train, name, settings)
    for result in found:
        assert difference(result, _reference(name)) < 1e-9


def _train(name: str, settings: dict[str, Any]) -> Result:
    return train_with_engine(name, **settings)
