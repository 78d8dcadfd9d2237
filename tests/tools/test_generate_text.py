"""The layout in which a model writes is not that in which it was trained."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_core.config.rules_layout import parallel_problems
from megatron_core.config.rules_stages import stage_problems
from tests.runs import tiny_config
from tools.generate_text import Settings, run_config


def test_how_layers_were_split_in_training_does_not_matter() -> None:
    trained = tiny_config(
        num_layers=4,
        pipeline_model_parallel_size=4,
        pipeline_model_parallel_layout="Et|tt||tL",
        sequence_parallel=True,
    )
    reader = SimpleNamespace(state={"config": trained.flat()})
    asked = Settings(load="nowhere", prompt="a", pipeline_model_parallel_size=2)
    config = run_config(reader, asked)
    assert config == tiny_config(num_layers=4, pipeline_model_parallel_size=2)
    assert [*stage_problems(config), *parallel_problems(config, 2)] == []
