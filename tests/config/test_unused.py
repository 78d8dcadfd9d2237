"""Settings without effect: each is named with what would give it one, and none that has an effect is."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.config.unused import UNREAD, unread_settings
from megatron_core.config.validate import problems
from tests.runs import TINY, tiny_config

NAMES = sorted({name for _, _, names in UNREAD for name in names.split()})
# Megatron-LM's scripts give these everywhere.
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
}
WITH_EFFECT = (
    {"position_embedding_type": "rope", "rotary_percent": 0.5, "use_rope_scaling": True, "rope_scaling_factor": 4.0},
    {"multi_latent_attention": True, "rotary_base": 5e5},
    {"optimizer": "muon", "muon_momentum": 0.5, "adam_beta2": 0.95},
    {"optimizer": "lion", "lion_beta1": 0.5},
    {"fp16": True, "initial_loss_scale": 65536.0},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"vocab_file": "v.json", "merge_file": "m.txt"},
    {"eval_iters": 1, "eval_interval": 100},
)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_setting_without_effect_is_accepted_and_named(name: str) -> None:
    config = tiny_config(**{"eval_iters": 0, name: HARMLESS[name]})
    assert not list(problems(config, 1))
    assert unread_settings(config).startswith(f"{name}=") and " (without " in unread_settings(config)


@pytest.mark.parametrize("settings", WITH_EFFECT)
def test_a_setting_with_effect_is_not_named(settings: dict) -> None:
    assert unread_settings(tiny_config(**settings)) == ""


def test_all_are_told_in_one_line_and_exist() -> None:
    config = tiny_config(lion_beta1=0.5, lion_beta2=0.5, sgd_momentum=0.5, adam_beta1=0.8)
    assert unread_settings(config) == (
        "sgd_momentum=0.5 (without --optimizer sgd); lion_beta1=0.5, lion_beta2=0.5 (without --optimizer lion)"
    )
    assert set(NAMES) <= RunConfig().flat().keys() and unread_settings(RunConfig.from_flat(TINY)) == ""
