"""Settings without effect: each is named with its condition, and no setting with an effect is named."""

from __future__ import annotations

import inspect
import operator
import re

import numpy as np
import pytest

from megatron_core.config import RunConfig, conditions
from megatron_core.config.rules_single import unread_settings
from megatron_core.config.run import RunContext, settings
from megatron_core.config.setting import ALWAYS, BY_RULE
from megatron_core.config.validate import problems
from megatron_core.training.pretrain import read_settings
from tests.runs import TINY, tiny_config

# Megatron-LM's scripts set these everywhere.
HARMLESS = {
    "rotary_percent": 0.5,
    "rope_scaling_factor": 4.0,
    "yarn_beta_fast": 16.0,
    "lion_beta1": 0.5,
    "sgd_momentum": 0.5,
    "muon_momentum": 0.5,
    "fim_rate": 0.1,
    "cp_comm_type": ("a2a",),
    "sequence_parallel": True,
    "initial_loss_scale": 65536.0,
    "hysteresis": 3,
    "powersgd_rank": 8,
    "tiktoken_pattern": "v1",
    "data_cache_path": "cache",
    "tokenizer_model": "tokenizer.json",
    "profile_step_start": 5,
    "wandb_exp_name": "run",
    "eval_interval": 100,
    "no_load_optim": True,
    "no_save_optim": True,
    "max_rollbacks": 9,
    "timing_log_option": "max",
    "split": "9,1,0",
    "num_dataset_builder_threads": 4,
    "overlap_grad_reduce": True,
    "use_distributed_optimizer": True,
    "zero_stage": 2,
    "grad_reduce_in_bf16": True,
    "ddp_reduce_scatter_with_fp32_accumulation": True,
    "ddp_bucket_size": 1000,
    "rank_order": "tp-dp-pp-cp-ep",
    "optimizer_cpu_offload": True,
    "add_qkv_bias": True,
    "add_attention_output_bias": True,
    "apply_query_key_layer_scaling": True,
    "expert_tensor_parallel_size": 1,
    "lr_warmup_init": 1e-4,
}
TOGETHER: list[tuple[dict, str]] = [
    ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, "cpu_offloading=True (without a GPU)"),
    (
        {"optimizer_cpu_offload": True, "optimizer_offload_dir": "d"},
        "optimizer_cpu_offload=True (with --optimizer-offload-dir)",
    ),
    (
        {"num_experts": 4, "disable_bias_linear": True, "moe_router_load_balancing_type": "aux_loss"},
        "moe_router_load_balancing_type=aux_loss (without --moe-aux-loss-coeff X)",
    ),
    (
        {"num_experts": 4, "disable_bias_linear": True, "moe_token_dispatcher_type": "allgather"},
        "moe_token_dispatcher_type=allgather (without experts split over ranks)",
    ),
    (
        {"num_experts": 4, "disable_bias_linear": True, "moe_ffn_hidden_size": 16, "ffn_hidden_size": 32},
        "ffn_hidden_size=32 (with experts of --moe-ffn-hidden-size in every layer)",
    ),
    (
        {"window_size": (4, 0), "window_attn_skip_freq": (0, 0)},
        "window_size=(4, 0), window_attn_skip_freq=(0, 0) (without a layer with the window)",
    ),
    (
        {"fp8_format": "hybrid", "fp8_amax_history_len": 16},
        "fp8_amax_history_len=16 (without --fp8-amax-compute-algo max)",
    ),
    (
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2, "weight_decay": 0.5},
        "weight_decay=0.5 (without --weight-decay-incr-style constant)",
    ),
    (
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe_act", "mla_up_proj")},
        "recompute_modules=moe_act (without --num-experts N); "
        "recompute_modules=mla_up_proj (without --multi-latent-attention)",
    ),
    ({"eval_iters": 0, "train_data_path": ("a",), "mock_data": False, "test_data_path": ("b",)}, "test_data_path=b"),
    (
        {"mock_data": True, "eod_mask_loss": True, "tokenizer_type": "NullTokenizer"},
        "eod_mask_loss=True (without token",
    ),
    ({"load": "x", "finetune": True, "no_load_optim": True}, "no_load_optim=True (with --finetune)"),
    ({"skip_train": True, "save": "x", "clip_grad": 0.5}, "clip_grad=0.5, save=x (with --skip-train)"),
]
WITH_EFFECT = (
    {"position_embedding_type": "rope", "rotary_percent": 0.5, "use_rope_scaling": True, "rope_scaling_factor": 4.0},
    {"multi_latent_attention": True, "rotary_base": 5e5},
    {"optimizer": "muon", "muon_momentum": 0.5, "adam_beta2": 0.95},
    {"optimizer": "lion", "lion_beta1": 0.5},
    {"fp16": True, "initial_loss_scale": 65536.0},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"vocab_file": "v.json", "merge_file": "m.txt"},
    {"eval_iters": 1, "eval_interval": 100},
    {"fp8_format": "hybrid", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
    {"disable_bias_linear": True, "add_qkv_bias": True},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "layernorm")},
    {"optimizer_offload_dir": "d"},
)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_setting_without_effect_is_accepted_and_named(name: str) -> None:
    config = tiny_config(**{"eval_iters": 0, name: HARMLESS[name]})
    assert not list(problems(config, 1))
    assert unread_settings(config).startswith(f"{name}=") and " (without " in unread_settings(config)


@pytest.mark.parametrize(("settings", "told"), TOGETHER)
def test_settings_that_make_each_other_idle_are_named(settings: dict, told: str) -> None:
    config = tiny_config(**settings)
    assert not list(problems(config, 1))
    assert told in unread_settings(config)


def test_settings_of_several_ranks_are_read_on_several_ranks() -> None:
    several = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "rank_order": "dp-tp-pp-cp-ep"}
    assert unread_settings(tiny_config(**several), 2) == "" != unread_settings(tiny_config(**several), 1)
    assert "(without several data-parallel" in unread_settings(tiny_config(**several, tensor_model_parallel_size=2), 2)
    assert unread_settings(tiny_config(optimizer_cpu_offload=True), 1, "cuda") == ""


def test_pairs_do_not_run_where_zero_frees_their_weights() -> None:
    experts = {"num_experts": 4, "disable_bias_linear": True, "expert_model_parallel_size": 2}
    config = tiny_config(**experts, overlap_moe_expert_parallel_comm=True, zero_stage=3)
    assert not list(problems(config, 2)) and not config.parallel.runs_in_pairs(config)
    assert "overlap_moe_expert_parallel_comm=True (with --zero-stage 3" in unread_settings(config, 2)


def test_every_setting_declares_when_it_is_read() -> None:
    """A new setting must declare a condition, ``ALWAYS`` or ``BY_RULE``, and a rule for resumed runs."""
    assert settings().keys() == RunConfig().flat().keys()  # a field without ``setting(...)`` is a KeyError
    assert not [name for name, declared in settings().items() if not (declared.needs or declared.when)]
    assert all(declared.resume is not None for declared in settings().values())


def test_conditions_can_be_evaluated_and_name_existing_settings() -> None:
    conditions = {each for declared in settings().values() for each in declared.needs + declared.when}
    for run in (
        RunContext.of_sections(RunConfig().sections()),
        RunContext.of_sections(RunConfig().sections(), world_size=8, device="cuda"),
    ):
        assert {bool(condition.holds(run)) for condition in conditions} == {True, False}
    for condition in conditions - {ALWAYS, BY_RULE}:
        for flag in re.findall(r"--([a-z0-9-]+)", condition.words):
            name = flag.replace("-", "_")
            assert name in settings() or name.removeprefix("no_") in settings(), condition.words


def test_conditions_read_existing_attributes() -> None:
    """The type checker does not see the type of ``run`` in ``conditions.py``."""
    run = RunContext.of_sections(RunConfig().sections())
    for path in set(re.findall(r"\brun\.(\w+(?:\.\w+)?)", inspect.getsource(conditions))):
        operator.attrgetter(path)(run)


def test_flags_with_their_default_values_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    run, topk = ["--mock-data", "--vocab-size", "64", "--train-iters", "1"], ["--moe-router-topk", "2"]
    read_settings("p", [*run, *topk, "--fp8-wgrad", "--no-swiglu", "--lr", "1e-3"])
    noted = " ".join(capsys.readouterr().err.split())
    assert "--fp8-wgrad (no effect without --fp8-format hybrid)" in noted
    assert noted.endswith("note: without effect here: moe_router_topk=2 (without --num-experts N)")
    read_settings("p", [*run, *topk, "--num-experts", "4", "--disable-bias-linear"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("settings", WITH_EFFECT)
def test_a_setting_with_effect_is_not_named(settings: dict) -> None:
    assert unread_settings(tiny_config(**settings)) == ""


def test_all_are_told_in_one_line_and_exist() -> None:
    config = tiny_config(lion_beta1=0.5, lion_beta2=0.5, sgd_momentum=0.5, adam_beta1=0.8)
    assert unread_settings(config) == (
        "sgd_momentum=0.5 (without --optimizer sgd); lion_beta1=0.5, lion_beta2=0.5 (without --optimizer lion)"
    )
    assert unread_settings(RunConfig.from_flat(TINY)) == ""


@pytest.mark.parametrize(
    ("setting", "legal"),
    [
        ({"num_layers": "2"}, "an integer"),
        ({"num_layers": 2.0}, "an integer"),
        ({"num_layers": None}, "an integer"),
        ({"train_iters": True}, "an integer or None"),
        ({"lr": "1e-4"}, "a number"),
        ({"bf16": 1}, "true or false"),
        ({"data_path": "corpus"}, "a list of strings"),
        ({"window_size": 5}, "a list of 2 integers or None"),
        ({"window_size": (5, "0")}, "a list of 2 integers or None"),
        ({"recompute_modules": "core_attn"}, "a list of core_attn, layernorm"),
        ({"position_embedding_type": ("rope",)}, "learned_absolute, rope"),
    ],
)
def test_values_of_wrong_types_are_named(setting: dict, legal: str) -> None:
    """A Python program may give them; as flags they cannot occur."""
    ((name, value),) = setting.items()
    (fault,) = problems(RunConfig.from_flat(TINY | setting), 1)
    assert fault.startswith(f"{name}={value!r} does not fit; legal: {legal}")


def test_numbers_of_other_types_are_numbers() -> None:
    settings_of_programs = {"lr": 1, "num_layers": np.int64(2), "weight_decay": np.float32(0.5), "data_path": []}
    assert not list(problems(RunConfig.from_flat(TINY | settings_of_programs), 1))


def test_an_unknown_name_has_a_hint() -> None:
    with pytest.raises(KeyError, match="number_layers is not a setting; perhaps you meant num_layers"):
        RunConfig.from_flat({"number_layers": 2})
