"""Megatron's configuration classes, whose fields are built from the engine's settings."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.mirror import default_of, refused_changes
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import config as sections
from megatron.training.config import PretrainConfigContainer, ProfilingConfig, RNGConfig, TrainingConfig
from megatron_core.config import ModelConfig
from megatron_core.errors import ConfigError

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
# Defaults of Megatron Core 0.20, some of which differ from the engine's.
DEFAULTS = [
    (TransformerConfig, {"num_layers": 0, "layernorm_epsilon": 1e-5, "moe_token_dispatcher_type": "allgather"}),
    (TransformerConfig, {"hidden_dropout": 0.1, "normalization": "LayerNorm", "fp8": None, "fp8_recipe": "delayed"}),
    (TransformerConfig, {"recompute_modules": None, "num_moe_experts": None, "transformer_impl": "transformer_engine"}),
    (MLATransformerConfig, {"q_lora_rank": 512, "kv_lora_rank": 512, "multi_latent_attention": True}),
    (OptimizerConfig, {"lr": None, "weight_decay": 0.01, "muon_momentum": 0.95, "optimizer_offload_fraction": 0.0}),
    (OptimizerConfig, {"exp_avg_dtype": torch.float32, "grad_norm_skip_threshold": float("inf")}),
    (DistributedDataParallelConfig, {"bucket_size": None, "data_parallel_sharding_strategy": "no_shard"}),
    (TrainingConfig, {"micro_batch_size": None, "iterations_to_skip": []}),
]


SETTINGS = yaml.safe_load(Path(__file__).with_name("megatron_defaults.yaml").read_text())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_engine_keeps_megatrons_default(name: str) -> None:
    """A new default in the engine must not change Megatron's: it becomes a row of ``defaults`` in ``mirror.yaml``."""
    kinds = (ModelParallelConfig, TransformerConfig, MLATransformerConfig, OptimizerConfig)
    classes = {kind.__name__: kind for kind in (*kinds, DistributedDataParallelConfig)} | vars(sections)
    found = {each.name: default_of(each) for each in fields(classes[name])}
    assert {field: found[field] for field in SETTINGS[name]} == SETTINGS[name]


@pytest.mark.parametrize(("kind", "expected"), DEFAULTS)
def test_defaults_are_those_of_megatron(kind: type, expected: dict[str, object]) -> None:
    found = {each.name: default_of(each) for each in fields(kind)}
    assert {name: found[name] for name in expected} == expected


def test_arguments_by_position() -> None:
    config = ModelParallelConfig(2, None, 1, None, True)
    assert (config.tensor_model_parallel_size, config.sequence_parallel) == (2, True)
    assert DistributedDataParallelConfig(True, True).overlap_grad_reduce
    assert OptimizerConfig("sgd", 0.5).lr == 0.5
    assert TransformerConfig(2, num_layers=3).tensor_model_parallel_size == 2
    with pytest.raises(TypeError, match="positional"):
        RNGConfig(1)
    with pytest.raises(TypeError, match="unknown_field"):
        TransformerConfig(**SHAPE, unknown_field=1)


def test_configurations_are_ordinary_dataclasses() -> None:
    functions = {name: nn.init.zeros_ for name in ("init_method", "output_layer_init_method", "embedding_init_method")}
    config = MLATransformerConfig(**SHAPE, **functions, qk_head_dim=8)
    assert [each.name for each in fields(config)].count("normalization") == 1
    for twin in (copy.deepcopy(config), copy.copy(config), replace(config), _pickled(config)):
        assert twin == config and type(twin) is MLATransformerConfig
    changed = replace(config, hidden_dropout=0.0)
    assert changed != config and (changed.hidden_dropout, changed.qk_head_dim) == (0.0, 8)
    assert "qk_head_dim=8" in repr(config)
    assert ProfilingConfig().profile_ranks is not ProfilingConfig().profile_ranks


def _pickled(config: object) -> object:
    return ForkingPickler.loads(ForkingPickler.dumps(config))


def test_renamed_fields_reach_the_engine() -> None:
    config = TransformerConfig(**SHAPE, layernorm_epsilon=1e-3, layernorm_zero_centered_gamma=True, num_moe_experts=4)
    model = config.model_config()
    assert isinstance(model, ModelConfig)
    assert (model.norm_epsilon, model.apply_layernorm_1p, model.num_experts) == (1e-3, True, 4)


def test_sections_have_megatrons_fields() -> None:
    """Fields of settings reach the run, fields without effect are accepted, and unsupported ones are refused."""
    container = PretrainConfigContainer(
        train=TrainingConfig(check_weight_hash_across_dp_replicas_interval=7, manual_gc=True, manual_gc_interval=10),
        logger=sections.LoggerConfig(log_timers_to_tensorboard=True, logging_level=20, log_energy=True),
        checkpoint=sections.CheckpointConfig(save="x", ckpt_format="torch_dist", ckpt_assume_constant_structure=True),
        dist=sections.DistributedInitConfig(use_gloo_process_groups=False, flight_recorder_dump_path="y"),
        rng=RNGConfig(te_rng_tracker=True),
    )
    config = container.run_config()
    assert (config.value("replica_check_interval"), config.checkpoint.ckpt_format) == (7, "torch_dist")
    DistributedDataParallelConfig(keep_fp8_transpose_cache=True, fsdp_manual_registration=True)
    OptimizerConfig(lr=1.0, muon_use_syrk=True, overlap_cpu_optimizer_d2h_h2d=True).translated()
    container.checkpoint.save_wgrads_interval = 3
    with pytest.raises(ConfigError, match="CheckpointConfig: save_wgrads_interval is not supported"):
        container.run_config()


def test_unsupported_fields_are_refused() -> None:
    assert refused_changes(TransformerConfig(**SHAPE, quant_recipe=[], fp8_param=False)) == []
    with pytest.raises(ConfigError, match="do not support qk_clip=True"):
        TransformerConfig(**SHAPE, qk_clip=True).model_config()
    with pytest.raises(ConfigError, match="nccl_ub is not supported"):
        DistributedDataParallelConfig(nccl_ub=True)
    with pytest.raises(ConfigError, match="main_grads_dtype is not supported"):
        OptimizerConfig(lr=1.0, main_grads_dtype=torch.bfloat16).translated()
