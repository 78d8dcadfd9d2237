"""Models that Megatron-LM cannot train are not written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.run import aliases
from megatron_core.config.setting import Resume, names_by_resume
from megatron_core.config.validate import problems
from megatron_core.hub.rules import ABSENT, FIXED_OF_MAMBA, without_arguments

OF_OTHERS = {
    *("moe_sparsemixer_threshold", "query_temperature_floor", "query_temperature_of_rotary"),
    *("parallel_residual_shared_norm", "rope_scaling_type"),
    *(f"longrope_{length}_{name}" for length in ("short", "long") for name in ("factor", "mscale")),
}
"""They matter only with settings that are refused."""
OF_TRAINING = {"moe_further_balancing_types", "moe_capacity_per", "output_z_loss_coeff"}
"""Losses, and the tokens that share a capacity in training."""
OF_PATTERN = {"mtp_layer_pattern", "mamba_mixer"}
"""The end of ``hybrid_layer_pattern``, and ``spec``, in Megatron-LM."""


def test_every_setting_of_the_function_is_an_argument_of_megatron_lm_or_listed() -> None:
    lines = (Path(__file__).parents[1] / "config" / "megatron_lm_flags.txt").read_text().split()
    theirs = {line.removeprefix("--").removesuffix("=").replace("-", "_") for line in lines}
    theirs |= {aliases()[name] for name in theirs if name in aliases()}
    ours = set(names_by_resume(ModelConfig, Resume.FUNCTION, Resume.TENSORS))
    assert ours - theirs == {*ABSENT, *OF_OTHERS, *OF_TRAINING, *OF_PATTERN, *FIXED_OF_MAMBA} - theirs


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, []),
        ({"geglu": True, "final_logit_softcapping": 30.0}, ["geglu=True", "final_logit_softcapping=30.0"]),
        ({"use_rope_scaling": True, "rope_scaling_type": "yarn"}, []),
        ({"use_rope_scaling": True, "rope_scaling_type": "ntk"}, ["rope_scaling_type=ntk"]),
        ({"rope_scaling_type": "ntk"}, []),
        ({"hybrid_layer_pattern": "M*"}, []),
        ({"hybrid_layer_pattern": "*-", "linear_conv_kernel_dim": 3, "norm_epsilon": 1e-6}, []),
        (
            {"hybrid_layer_pattern": "M*", "linear_conv_kernel_dim": 3, "norm_epsilon": 1e-6},
            ["linear_conv_kernel_dim=3", "norm_epsilon=1e-06"],
        ),
        (
            {"hybrid_layer_pattern": "M*", "mamba_dt_min": 0.001, "mamba_dt_max": 0.1},
            ["mamba_dt_max=0.1", "mamba_dt_min=0.001"],
        ),
        ({"num_experts": 4, "moe_router_score_function": "sparsemixer"}, ["moe_router_score_function=sparsemixer"]),
    ],
)
def test_settings_without_arguments(settings: dict[str, object], named: list[str]) -> None:
    assert sorted(without_arguments(ModelConfig(**settings))) == sorted(named)  # type: ignore[arg-type]


def test_a_run_that_would_write_such_a_model_is_refused() -> None:
    run = {"mock_data": True, "vocab_size": 64, "train_iters": 1, "save": "out", "softmax_scale": 0.5}
    wrong = list(problems(RunConfig.from_flat(run | {"ckpt_format": "torch_dist"}), 1))
    assert len(wrong) == 1 and "ckpt_format=torch_dist does not write softmax_scale=0.5" in wrong[0]
    assert not list(problems(RunConfig.from_flat(run | {"ckpt_format": "torch_dcp"}), 1))


def test_a_run_with_a_pattern_names_what_the_format_lacks() -> None:
    run = {"mock_data": True, "vocab_size": 64, "train_iters": 1, "save": "out"}
    run |= {"num_layers": 2, "ckpt_format": "torch_dist"}
    assert not list(problems(RunConfig.from_flat(run | {"hybrid_layer_pattern": "*-"}), 1))
    wrong = list(problems(RunConfig.from_flat(run | {"hybrid_layer_pattern": "*C"}), 1))
    assert len(wrong) == 1 and "*C, whose layers C Megatron Core lacks; use torch_dcp" in wrong[0]
    delta_net = run | {"hybrid_layer_pattern": "*G", "normalization": "RMSNorm", "swiglu": True}
    assert not list(problems(RunConfig.from_flat(delta_net), 1))
    wrong = list(problems(RunConfig.from_flat(delta_net | {"swiglu": False, "apply_layernorm_1p": True}), 1))
    assert len(wrong) == 1 and "swiglu=False with gated delta nets, which Megatron-LM" in wrong[0]
    gpt = run | {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": (0, 1)}
    gpt |= {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope"}
    assert not list(problems(RunConfig.from_flat(gpt), 1))
    wrong = list(problems(RunConfig.from_flat(gpt | {"mtp_num_layers": 1}), 1))
    assert len(wrong) == 1 and "mtp_num_layers=1 with a recurrence in the last layer" in wrong[0]
