"""Comparison of the table of keys with the configuration classes of DeepSpeed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.translation import find_key, key_names

REFERENCE = Path(sys.prefix).resolve() / "reference"
FIELDS = """
import inspect, json
from pydantic import BaseModel
from deepspeed.runtime.config import *
from deepspeed.runtime import config, constants
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.monitor.config import DeepSpeedMonitorConfig

def paths(kind, above):
    for own, field in kind.model_fields.items():
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        inner = [each for each in kinds if inspect.isclass(each) and issubclass(each, BaseModel)]
        for name in {own, field.alias or own}:
            yield from paths(inner[0], f"{above}{name}.") if inner else [above + name]

found = [*paths(DeepSpeedZeroConfig, "zero_optimization."), *paths(DeepSpeedMonitorConfig, "")]
found += [*paths(DeepSpeedBF16Config, "bf16."), *paths(DeepSpeedFP16Config, "fp16.")]
found += [*paths(HybridEngineConfig, "hybrid_engine."), *paths(CompileConfig, "compile.")]
source = inspect.getsource(DeepSpeedConfig) + "".join(
    inspect.getsource(each)
    for name, each in vars(config).items()
    if name.startswith("get_") and inspect.isfunction(each)
)
read = {name: value for name, value in vars(config).items() if name.isupper() and isinstance(value, str)}
words = set(__import__("re").findall(r"get_scalar_param\\(\\s*param_dict,\\s*(\\w+)", source))
print("RESULT" + json.dumps([found, sorted(read[name] for name in words if name in read)]))
"""


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
def test_no_field_of_deepspeeds_classes_is_missing() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REFERENCE), "DS_ACCELERATOR": "cpu"}
    found = subprocess.run([sys.executable, "-c", FIELDS], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    fields, scalars = json.loads(found.stdout.partition("RESULT")[2])
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
