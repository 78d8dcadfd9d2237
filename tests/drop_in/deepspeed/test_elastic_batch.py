"""Elastic batches against results of DeepSpeed 0.19.6 and against their definition."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_core.any_model.elastic_batch import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    ensure_immutable_elastic_config,
)
from megatron_core.errors import ConfigError

LARGE: dict[str, Any] = {"max_train_batch_size": 10_000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32}
LARGE |= {"max_gpus": 1500, "version": 0.1}
ODD: dict[str, Any] = {"max_train_batch_size": 2000, "micro_batch_sizes": [5, 7, 3], "max_gpus": 64}
ROWS: list[tuple[dict[str, Any], int, list[int]]] = [
    (LARGE, 0, [9792, 23, 5934]),
    (LARGE, 64, [9792, 23, 5934, 17]),
    ({"max_train_batch_size": 32, "micro_batch_sizes": [1, 2, 3, 7], "version": 0.1}, 4, [24, 8, 60, 3]),
    (
        {"max_train_batch_size": 100, "micro_batch_sizes": [8, 10, 12], "version": 0.1, "prefer_larger_batch": False},
        *(0, [96, 7, 36]),
    ),
    ({**LARGE, "version": 0.2, "num_gpus_per_node": 8}, 16, [9984, 1, 16, 16]),
    (
        {
            "max_train_batch_size": 2000,
            "micro_batch_sizes": [2, 4, 6],
            "num_gpus_per_node": 4,
            "model_parallel_size": 2,
        },
        *(8, [1920, 24, 3024, 6]),
    ),
    ({**ODD, "min_gpus": 8, "num_gpus_per_node": 8, "prefer_larger_batch": False}, 24, [1344, 7, 248, 7]),
    ({**ODD, "min_gpus": 4, "num_gpus_per_node": 4}, 44, [1980, 1, 44, 5]),
]
"""Section, ranks, and DeepSpeed's batch, number and sum of its numbers of ranks, and micro-batch."""


def _config(section: dict[str, Any]) -> dict[str, Any]:
    return {"elasticity": {"enabled": True, **section}}


@pytest.mark.parametrize(("section", "ranks", "expected"), ROWS)
def test_equals_deepspeed(section: dict[str, Any], ranks: int, expected: list[int]) -> None:
    batch, sizes, *micro_batch = compute_elastic_config(_config(section), "0.19.6", world_size=ranks)
    assert [batch, len(sizes), sum(sizes), *micro_batch] == expected


def test_each_number_of_ranks_divides_the_batch() -> None:
    batch, sizes = compute_elastic_config(_config(LARGE), "0.19.6")
    divides = [n for n in range(32, 1501) if any(batch % (n * size) == 0 for size in LARGE["micro_batch_sizes"])]
    assert sizes == divides and batch <= LARGE["max_train_batch_size"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"micro_batch_sizes": [2, 0.5]}, ElasticityConfigError, r"micro_batch_sizes=\[2, 0.5\] must be a list"),
        ({"micro_batch_sizes": 5}, ElasticityConfigError, "micro_batch_sizes=5 must be"),
        ({"max_train_batch_size": None}, ElasticityConfigError, "max_train_batch_size=None must be an integer"),
        ({"min_gpus": -1}, ElasticityConfigError, "min_gpus=-1"),
        ({"max_train_batch_size": 2**40}, ElasticityConfigError, "must be an integer from 1 to 2\\^31"),
        ({"min_gpus": 2000}, ElasticityConfigError, "max_gpus=1500 must be >= min_gpus=2000"),
        ({"max_train_batch_size": 40}, ElasticityError, "max_train_batch_size=40 is too small for min_gpus=32"),
        ({"max_train_batch_size": 10}, ElasticityConfigError, "must be at most 10"),
        ({"version": 0.3}, ElasticityConfigError, "version=0.3 must be 0.1 or 0.2"),
        ({"model_parallel_size": 2}, ElasticityConfigError, "model_parallel_size=2 needs version 0.2"),
        ({"version": 0.2}, ElasticityConfigError, "give world_size"),
        ({"version": 0.2, "model_parallel_size": 3, "num_gpus_per_node": 8}, ElasticityConfigError, "give world_size"),
        ({"enabled": False}, ElasticityConfigError, "no section"),
    ],
)
def test_wrong_sections(
    change: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(error, match=message):
        compute_elastic_config(_config({**LARGE, **change}), "0.19.6")


def test_ranks_and_versions_that_do_not_fit() -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize, match="128 ranks cannot train the batch 9792"):
        compute_elastic_config(_config(LARGE), "0.19.6", world_size=128)
    with pytest.raises(ElasticityError, match="num_gpus_per_node=8 must be a multiple of model_parallel_size=3"):
        compute_elastic_config(
            _config({**LARGE, "version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 3}), "0.19.6", 16
        )
    with pytest.raises(ElasticityError, match=r"must be 0\.3\.8 or later"):
        compute_elastic_config(_config(LARGE), "0.2")


def test_the_json_of_a_training() -> None:
    from deepspeed.translation import translate

    section = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [8, 12, 16, 17], "version": 0.1}
    result = translate({"elasticity": section}, 3)
    triple = result.train_batch_size, result.train_micro_batch_size_per_gpu, result.gradient_accumulation_steps
    assert triple == (96, 16, 2)
    assert result.settings["global_batch_size"] == 96 and result.settings["micro_batch_size"] == 16
    with pytest.raises(ConfigError, match=r"elasticity\.enabled chooses the batch: remove train_batch_size"):
        translate({"elasticity": section, "train_batch_size": 6}, 3)
    ignoring = {**section, "ignore_non_elastic_batch_info": True}
    assert translate({"elasticity": ignoring, "train_batch_size": 6}, 3).train_batch_size == 96
    with pytest.raises(ElasticityIncompatibleWorldSize, match="5 ranks cannot train"):
        translate({"elasticity": section}, 5)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (json.dumps(LARGE), ""),
        (json.dumps({**LARGE, "min_gpus": 64}), ""),
        (json.dumps({**LARGE, "micro_batch_sizes": [8]}), r"micro_batch_sizes=\[8, 12, 16, 17\], but .* has \[8\]"),
        (json.dumps({**LARGE, "version": 0.2}), "version=0.1, but DEEPSPEED_ELASTICITY_CONFIG has 0.2"),
        (json.dumps(_config(LARGE)), "max_train_batch_size=None"),
        ("{", "must be JSON"),
    ],
)
def test_the_section_of_a_scheduler(variable: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", variable)
    with pytest.raises(ElasticityConfigError, match=message) if message else nullcontext():
        ensure_immutable_elastic_config(LARGE)
