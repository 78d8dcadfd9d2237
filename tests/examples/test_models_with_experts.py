"""The example configurations with experts: parameter counts, comparison and training."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.file import read_config
from megatron_core.config.flops import flops_per_token, forward_flops_per_token
from megatron_core.config.validate import problems
from megatron_core.planner.layout import Layout
from megatron_core.reports.dry_run import RankEstimate
from megatron_core.verify import shrunk
from megatron_core.verify.comparison import configured, every_layout

EXAMPLES = Path(__file__).parents[2] / "examples"
# Ranks; parameters, total and active per token, from the models' own configurations.
MODELS = {
    "mixtral_8x7b": (64, 46_702_792_704, 12_879_925_248),
    "mixtral_8x22b": (128, 140_630_071_296, 39_161_468_928),
    "qwen3_30b_a3b": (16, 30_532_122_624, 3_353_032_704),
    "qwen3_235b_a22b": (128, 235_093_634_560, 22_190_763_520),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models(name: str) -> None:
    ranks, total, active = MODELS[name]
    estimate = RankEstimate.of(read_config(EXAMPLES / f"{name}.yaml"), ranks, ranks - 1)
    assert (estimate.model_parameters, estimate.active_parameters) == (total, active)


def test_static_memory_that_was_measured() -> None:
    """Megatron-LM's golden values have 19.74 GB after a step of Mixtral 8x7B in TP2 PP4 EP8 ETP1.

    Source: the release case of Mixtral 8x7B in its tests/functional_tests; the number of GPUs is inferred.
    """
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
    config = RunConfig.from_flat(read_config(EXAMPLES / "mixtral_8x7b.yaml").flat() | layout)
    sizes = RankEstimate.of(config, 64, 63).bytes_by_kind
    assert sum(sizes[kind] for kind in ("weights", "gradients", "optimizer")) == pytest.approx(19.743e9, rel=0.08)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("words", ["tp2 sp dp2 ep2 etp1", "pp2 dp4 ep4 zero1"])
def test_shrunk_models_keep_their_features_and_fit(name: str, words: str) -> None:
    config, layout = read_config(EXAMPLES / f"{name}.yaml"), Layout.parse(words)
    small = shrunk(config, [layout])
    assert list(problems(configured(small, layout, "float64"), layout.world_size)) == []
    assert small.model.num_experts == 8 and small.model.moe_aux_loss_coeff == config.model.moe_aux_loss_coeff
    assert small.model.expert_ffn_size < 256


def test_shrunk_groups_and_patterns() -> None:
    """DeepSeek-V3's router: groups still divide the experts, and the first layers are still dense."""
    model = {
        "num_layers": 61,
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "ffn_hidden_size": 18432,
        "disable_bias_linear": True,
        "swiglu": True,
        "num_experts": 256,
        "moe_layer_freq": (0,) * 3 + (1,) * 58,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
    }
    layout = Layout.parse("tp2 sp ep2 etp1 pp2")
    small = shrunk(RunConfig.from_flat(model), [layout]).model
    assert (small.num_experts, small.moe_router_num_groups, small.moe_router_group_topk) == (8, 2, 1)
    assert small.moe_layer_freq == (0, 1, 1, 1, 1, 1, 1, 1, 1)
    flat = shrunk(RunConfig.from_flat(model), [layout])
    assert list(problems(configured(flat, layout, "float64"), 4)) == []


def test_flops_count_the_experts_that_a_token_uses() -> None:
    """6 FLOPs for each matrix element that is applied to the token."""
    model = ModelConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=4,
        swiglu=True,
        ffn_hidden_size=160,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=32,
        moe_shared_expert_gate=True,
        moe_layer_freq=(0, 1, 1),
    )
    terms = forward_flops_per_token(model, 0, 256)
    weights = 3 * 4 * 64 * 64 + 3 * 64 * 160 + 64 * 256 + 2 * (64 * 8 + 2 * 3 * 64 * 48 + 3 * 64 * 32 + 64)
    assert sum(terms.values()) == 2 * weights and flops_per_token(model, 0, 256) == 6 * weights


def test_words_of_layouts_with_experts() -> None:
    for text in ("tp2 dp2 ep2", "tp2 dp2 ep2 etp1 sp", "dp4 ep4", "tp2 etp1"):
        assert str(Layout.parse(text)) == text
    layouts = list(every_layout(4, 2, experts=True))
    assert len(set(layouts)) == len(layouts)
    assert Layout.parse("tp2 dp2 ep4 etp1 sp") in layouts and Layout.parse("dp4 ep2 etp2 zero1") in layouts
    for layout in layouts:
        assert Layout.of(RunConfig.from_flat(layout.settings()).parallel, 2, 4) == layout
