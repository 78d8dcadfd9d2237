"""Models of the caller in every ZeRO stage against torch alone in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from megatron_core.verify.ranks import run_ranks
from tests.any_model.models import Result, difference, train_in_stages, train_with_engine, train_with_torch
from tests.sample import WHOLE_MATRIX

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
    "tangled": [ROWS[0], ROWS[5]],
    "convolutions": [ROWS[1]],
    "gpt2": [ROWS[2]],
    "mixtral": [ROWS[7]],
    "llama": [ROWS[5]],
    "qwen3": [ROWS[6]],
    "vit": [ROWS[4]],
    "bert": [ROWS[3]],
}
"""Each model and each row at least once; ``make verify-all`` runs every pair."""


PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 2}
ALL_OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
STAGED: list[tuple[int, dict[str, Any]]] = [
    (2, PIPELINE | {"global_batch_size": 3}),
    (2, PIPELINE | {"global_batch_size": 1, "zero_stage": 0}),
    (4, PIPELINE | {"global_batch_size": 2, "zero_stage": 1}),
    (4, PIPELINE | {"global_batch_size": 6, "zero_stage": 3, **ALL_OVERLAPS}),
    (
        4,
        PIPELINE | {"global_batch_size": 6, "zero_stage": 2, "pipeline_schedule": "gpipe", "overlap_grad_reduce": True},
    ),
    (2, PIPELINE | {"global_batch_size": 3, "pipeline_schedule": "zb_h1", "recompute_granularity": "full"}),
    (4, PIPELINE | {"global_batch_size": 3, "tensor_model_parallel_size": 2}),
]
CHUNKS: list[tuple[int, dict[str, Any]]] = [
    (2, PIPELINE | {"global_batch_size": 3, "num_virtual_stages_per_pipeline_rank": 2}),
    (2, PIPELINE | {"global_batch_size": 3, "pipeline_schedule": "zb_v"}),
    (4, PIPELINE | {"global_batch_size": 6, "pipeline_schedule": "dualpipe_v", "zero_stage": 3, **ALL_OVERLAPS}),
]
STAGED_IN_MAKE_TEST = {
    "gpt2": [STAGED[3], STAGED[6]],
    "llama": [STAGED[0]],
    "qwen3": [STAGED[1]],
    "mixtral": [STAGED[2]],
    "vit": [STAGED[5]],
    "bert": [STAGED[4]],
    "convolutions": [STAGED[0]],
}
STAGED_ROWS = [(name, *row) for name, rows in STAGED_IN_MAKE_TEST.items() for row in (STAGED if WHOLE_MATRIX else rows)]
STAGED_ROWS = [row for row in STAGED_ROWS if row[0] in ("gpt2", "llama", "qwen3") or row[1:] != STAGED[6]]
STAGED_ROWS += [("gpt2 of 4 layers", *row) for row in CHUNKS]
"""Models in automatic pipeline stages; tensor parallelism only of models with a plan that 2 ranks can share."""


@cache
def _reference(name: str, *sizes: int) -> Result:
    return train_with_torch(name, *sizes)


def _label(value: Any) -> Any:
    return value if isinstance(value, str | int) else "-".join(f"{k}={v}" for k, v in value.items()) or "plain"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [(name, *row) for name in IN_MAKE_TEST for row in (ROWS if WHOLE_MATRIX else IN_MAKE_TEST[name])],
    ids=_label,
)
def test_equals_torch(name: str, ranks: int, settings: dict[str, Any]) -> None:
    _reference(name)  # loads the model's module, which the forked ranks inherit
    found = [train_with_engine(name, **settings)] if ranks == 1 else run_ranks(ranks, _train, name, settings)
    for result in found:
        assert difference(result, _reference(name)) < 1e-9


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("name", "ranks", "settings"), STAGED_ROWS, ids=_label)
def test_automatic_stages_equal_torch(name: str, ranks: int, settings: dict[str, Any]) -> None:
    expected = _reference(name, settings["global_batch_size"], 5)
    found = run_ranks(ranks, train_in_stages, name, 5, settings)
    for result in found:
        assert difference(result, expected) < 1e-9
    if "tensor_model_parallel_size" not in settings:
        assert {each for result in found for each in result["gradients"]} == {*expected["gradients"]}


def _train(name: str, settings: dict[str, Any]) -> Result:
    return train_with_engine(name, **settings)
