"""Configurations of Megatron-LM as dictionaries, YAML files and objects; builders of models; small helpers."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from megatron.core import config, typed_torch
from megatron.core.dist_checkpointing import dict_utils
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
from megatron.core.experimental import ExperimentalNotEnabledError, experimental_cls
from megatron.core.fault_injector import FaultInjectorConfig, get_fault_delay
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.tokenizers.text.parsers import PARSER_MAPPING
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.activation_logging import ActivationLogger
from megatron.training.config import PretrainConfigContainer, TrainingConfig
from megatron.training.config.container import ConfigContainerBase
from megatron.training.config.instantiate_utils import (
    InstantiationException,
    InstantiationMode,
    instantiate,
    target_allowlist,
)
from megatron.training.config.yaml_utils import safe_yaml_representers
from megatron.training.models.base import ModelConfig, compose_hooks
from megatron.training.models.dist_utils import to_empty_if_meta_device
from megatron.training.models.gpt import GPTModelConfig
from megatron_core.errors import ConfigError

TRAIN = "megatron.training.config.training_config.TrainingConfig"
SHAPE: dict[str, Any] = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}


@dataclass(kw_only=True)
class Sections(ConfigContainerBase):
    train: TrainingConfig = field(default_factory=TrainingConfig)
    dtype: torch.dtype = torch.float32


def test_a_container_survives_dictionary_and_file(tmp_path: Path) -> None:
    given = PretrainConfigContainer(train=TrainingConfig(train_iters=7))
    entries = given.to_dict()
    assert entries["train"]["_target_"] == TRAIN and entries["train"]["train_iters"] == 7
    assert instantiate(entries["train"], mode=InstantiationMode.STRICT) == given.train
    given.to_yaml(str(tmp_path / "run.yaml"))
    read = PretrainConfigContainer.from_yaml(str(tmp_path / "run.yaml"))
    assert read.train == given.train and read.checkpoint == given.checkpoint
    with pytest.raises(ValueError, match="extra keys"):
        PretrainConfigContainer.from_dict(entries | {"unknown": 1})


@pytest.mark.parametrize(
    "target",
    [
        *(
            "os.system",
            "torch.load",
            "torch.hub.load",
            "torch.utils.collect_env.run",
            "torch.from_file",
            "torch.nn.modules.module.torch.load",
        ),
        *(
            "transformers.AutoModel.from_pretrained",
            "signal.raise_signal",
            "megatron.core.transformer.spec_utils.import_module",
        ),
        *("megatron.training.argument_utils.import_module", "megatron.core.utils.functools.reduce", "torch.os.system"),
        "megatron.training.config.instantiate_utils.target_allowlist.disable",
        *("megatron.core.dist_checkpointing.save", "megatron.training.checkpointing.load_checkpoint"),
    ],
)
def test_a_file_cannot_name_functions_that_run_code(target: str) -> None:
    with pytest.raises(InstantiationException, match=r"allowlist|locating"):
        instantiate({"_target_": target, "_args_": ["x"]})
    assert target_allowlist.enabled


def test_instantiate_calls_what_the_list_allows() -> None:
    linear = instantiate({"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3})
    assert isinstance(linear, nn.Linear) and linear.weight.shape == (3, 2)
    assert instantiate({"_target_": "torch.float16", "_call_": False}) is torch.float16
    half = instantiate({"_target_": "torch.nn.functional.softmax", "_partial_": True, "dim": 0})
    assert isinstance(half, functools.partial) and half.keywords == {"dim": 0}
    assert instantiate([{"_target_": TRAIN, "train_iters": 2}])[0].train_iters == 2
    assert instantiate({"_target_": TRAIN}, train_iters=3).train_iters == 3
    with pytest.raises(InstantiationException, match=r"Unexpected config keys.*nothing"):
        instantiate({"_target_": TRAIN, "nothing": 1}, mode=InstantiationMode.STRICT)


def test_yaml_has_names_of_functions_only_inside_the_context() -> None:
    with safe_yaml_representers():
        text = yaml.safe_dump({"f": nn.functional.gelu, "dtype": torch.bfloat16, "mode": InstantiationMode.STRICT})
    found = yaml.safe_load(text)
    assert found["dtype"] == {"_target_": "torch.bfloat16", "_call_": False}
    assert found["mode"]["_args_"] == ["strict"]
    with pytest.raises(yaml.YAMLError):
        yaml.safe_dump(torch.bfloat16)


def test_the_configuration_of_a_gpt() -> None:
    given = GPTModelConfig(transformer=TransformerConfig(**SHAPE), vocab_size=64)
    given.hidden_dropout = 0.5
    assert given.transformer.hidden_dropout == 0.5 and given.hidden_size == 32
    assert ModelConfig.from_dict({"_target_": f"{__name__}.Plain", "_builder_": "x", "size": 3, "other": 1}).size == 3
    with pytest.raises(InstantiationException):
        ModelConfig.from_dict({"_target_": "subprocess.Popen", "_builder_": "x"})
    layers: dict[str, Any] = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    odd = TransformerConfig(**SHAPE | {"num_layers": 6}, **layers, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(AssertionError, match="num_layers=6"):
        GPTModelConfig(transformer=odd, vocab_size=64).finalize()
    assert compose_hooks([lambda x: x + 1, lambda x: x * 2])(3) == 8


@dataclass
class Plain(ModelConfig):
    size: int = 1


def test_only_tensors_on_the_meta_device_lose_their_values() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.arange(3.0))
    module.weight = nn.Parameter(torch.empty(2, device="meta"))
    to_empty_if_meta_device(module, device=torch.device("cpu"))
    assert module.weight.device.type == "cpu" and torch.equal(module.get_buffer("kept"), torch.arange(3.0))


def test_nested_dictionaries() -> None:
    left, right = {"a": [1, torch.ones(2)], "b": 2}, {"a": [1, torch.tensor([1.0, 0.0])], "c": 3}
    only_left, only_right, unequal = dict_utils.diff(left, right)
    assert (only_left, only_right, unequal[0][0]) == ([("b",)], [("c",)], ("a", 1))
    odd, even = dict_utils.extract_matching_values({"x": [1, 2, 3], "y": {}}, lambda v: v % 2 == 1)
    assert odd == {"x": [1, 3]} and even == {"x": [2], "y": {}}
    assert dict_utils.merge({"x": {"a": 1}}, {"x": {"b": 2}}) == {"x": {"a": 1, "b": 2}}
    with pytest.raises(ValueError, match="Duplicate"):
        dict_utils.merge({"a": 1}, {"a": 1})
    assert dict_utils.dict_list_map_outplace(lambda v: -v, {"a": [1, 2]}) == {"a": [-1, -2]}
    assert parse_strict_flag("log_all") is StrictHandling.LOG_ALL


def test_experimental_classes_need_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    @experimental_cls("0.1.0")
    class Early:
        size = 3

    with pytest.raises(ExperimentalNotEnabledError):
        Early()
    monkeypatch.setattr(config, "ENABLE_EXPERIMENTAL", True)
    made = Early()
    assert isinstance(made, Early) and made.size == Early.size == 3


def test_faults_are_not_injected() -> None:
    with pytest.raises(ConfigError, match="use --inject-fault"):
        get_fault_delay(FaultInjectorConfig(fault_injector_fault_delay=2.5))


def test_parsers_separate_reasoning() -> None:
    parser = PARSER_MAPPING["deepseek-r1-reasoning"]
    assert parser.parse("a<think>b</think>c") == ("c", {"reasoning": "b"})
    forced = {"chat_template_kwargs": {"enable_thinking": False}}
    assert PARSER_MAPPING["nemotron-v3-reasoning"].parse("<think>b", **forced) == ("b", {})


def test_activations_are_recorded_until_hooks_are_removed(tmp_path: Path) -> None:
    model, log = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), ActivationLogger(str(tmp_path))
    log.register_activation_hooks([model])
    x = torch.randn(4, 2)
    output = model(x)
    found = log._activations_state_dict["model_chunk0"]
    assert torch.equal(found["0/input0"], x) and torch.equal(found["2/output0"], output)
    log.remove_activation_hooks()
    model(x + 1)
    assert torch.equal(log._activations_state_dict["model_chunk0"]["0/input0"], x)


def test_patterns_of_layers_and_signatures() -> None:
    class Settings:
        num_layers, linear_attention_freq, experimental_attention_variant = 6, 3, None

    assert get_linear_attention_pattern(Settings) == [1, 1, 0, 1, 1, 0]

    @typed_torch.copy_signature(str.join)
    def same(*args: str) -> str:
        return str.join(*args)

    assert list(inspect.signature(same).parameters) == ["self", "iterable"]
    with pytest.raises(ValueError, match="not None"):
        typed_torch.not_none(None)
