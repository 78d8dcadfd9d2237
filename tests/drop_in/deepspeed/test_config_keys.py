"""Comparison of the table of keys with the configuration classes of DeepSpeed."""

import pytest

from deepspeed.key_table import find_key, key_names
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
def test_no_field_of_deepspeeds_classes_is_missing() -> None:
    fields, scalars = ask(Task("tests.drop_in.deepspeed.traces:fields"))
    assert len(fields) > 100
    assert len(scalars) > 15
    assert [path for path in fields if find_key(path) is None] == []
    assert [name for name in scalars if name not in key_names()] == []


def test_deepspeed_config_has_the_translated_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = DeepSpeedConfig({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert (config.train_micro_batch_size_per_gpu, config.zero_optimization_stage) == (4, 2)
    assert config.bfloat16_config.enabled and not config.float16_config.enabled
    with pytest.raises(DeepSpeedConfigError, match="must be given"):
        DeepSpeedConfig({})
