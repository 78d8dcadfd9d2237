"""The pipeline plan of a configured run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_core.config import RunConfig
from megatron_core.config.partition import plan_of
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.schedules import TRAINING, interleaved, make_plan, one_f_one_b
from tests.schedules.plans import format_plan


def config(**settings: object) -> RunConfig:
    return RunConfig.from_flat({"num_layers": 8, "pipeline_model_parallel_size": 2} | settings)


def test_defaults() -> None:
    assert plan_of(config(), 4) == one_f_one_b(2, 4)
    assert plan_of(config(num_virtual_stages_per_pipeline_rank=2), 4) == interleaved(2, 2, 4)


@pytest.mark.parametrize("name", TRAINING)
def test_names(name: str) -> None:
    chunks = 2 if name == "interleaved" else None
    found = plan_of(config(pipeline_schedule=name, num_virtual_stages_per_pipeline_rank=chunks), 4)
    assert found == make_plan(name, 2, found.num_chunks, 4)


def test_a_plan_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    plan = make_plan("zb_v", 2, 2, 3)
    path.write_text(format_plan(plan))
    assert plan_of(config(pipeline_plan=str(path)), 3) == plan
    assert plan_of(config(pipeline_plan=str(path), num_virtual_stages_per_pipeline_rank=2), 3) == plan


@pytest.mark.parametrize(
    ("settings", "micros", "sentence"),
    [
        ({}, 4, "micro-batches of a rank=3, but the run has 4"),
        ({"pipeline_model_parallel_size": 4}, 3, "pipeline_model_parallel_size=2, but the run has 4"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, 3, "num_virtual_stages_per_pipeline_rank=1, but the run has 2"),
    ],
)
def test_a_plan_for_another_run_is_refused(tmp_path: Path, settings: dict, micros: int, sentence: str) -> None:
    path = tmp_path / "plan.txt"
    path.write_text(format_plan(one_f_one_b(2, 3)))
    with pytest.raises(ConfigError, match=sentence):
        plan_of(config(pipeline_plan=str(path), **settings), micros)


def test_a_plan_that_cannot_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("0F0 0B0 0F1 0B1\n1F0 1B0 1F1\n")
    with pytest.raises(LayoutError, match="1B1 is missing"):
        plan_of(config(pipeline_plan=str(path)), 2)
