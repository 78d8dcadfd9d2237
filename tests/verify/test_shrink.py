"""Small models with the features of large ones."""

from __future__ import annotations

import pytest

from megatron_core.commands.verify_layout import full_size_model
from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.datasets.loader import packing_of
from megatron_core.errors import ConfigError
from megatron_core.planner.layout import Layout
from megatron_core.tokenizers import tokenizer_of
from megatron_core.verify.comparison import configured, fitting_layouts
from megatron_core.verify.shrink import at_full_size, shrunk

LLAMA_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "position_embedding_type": "rope",
    "rotary_base": 500000.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_length": 8192,
    "micro_batch_size": 1,
    "global_batch_size": 1024,
    "vocab_size": 128256,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "nowhere",
    "data_path": ("nowhere",),
    "train_samples": 10_000_000,
    "lr_warmup_fraction": 0.1,
    "save": "nowhere",
    "load": "nowhere",
    "bf16": True,
}
GPT2 = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 1024,
    "vocab_size": 50257,
    "train_iters": 5,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 3,
}
HUNDRED_HEADS = {"num_attention_heads": 96, "hidden_size": 96 * 64, "num_layers": 3, "train_iters": 1}


DELTA_NET = {"num_layers": 12, "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": (4,)}


HYBRID = {"num_layers": 52, "hybrid_layer_pattern": "M-M-M-M*-M-M-" * 4, "hidden_size": 4096}


@pytest.mark.parametrize("model", [LLAMA_8B, GPT2, HUNDRED_HEADS, {}, DELTA_NET, HYBRID])
@pytest.mark.parametrize(
    "layout", ["cp4 tp2", "tp2 sp", "tp3", "tp8 sp dp2", "pp4 v2", "pp3 v4", "dp3 zero1", "tp6 pp2"]
)
def test_the_small_model_fits_the_layout(model: dict, layout: str) -> None:
    layout = Layout.parse(layout)
    small = configured(shrunk(RunConfig.from_flat(model), [layout]), layout, "float64")
    assert list(problems(small, layout.world_size)) == []
    assert small.model.num_layers < max(8, layout.num_stages) + layout.num_stages
    assert small.model.hidden_size <= 8 * 24
    assert small.data.seq_length <= 24


def test_features_stay() -> None:
    """Only sizes change, and settings of files."""
    large = RunConfig.from_flat(LLAMA_8B)
    small = shrunk(large, [Layout(tp=2)])
    for feature in ("normalization", "swiglu", "position_embedding_type", "rotary_base", "disable_bias_linear"):
        assert getattr(small.model, feature) == getattr(large.model, feature)
    assert small.model.untie_embeddings_and_output_weights and small.model.group_query_attention
    assert small.model.num_attention_heads == 4 * small.model.num_query_groups == 8
    assert small.model.ffn_hidden_size == 224  # 3.5 times the hidden size, as in the large one
    assert (small.checkpoint.save, small.checkpoint.load, small.data.data_path) == (None, None, ())


def test_widths_of_experts_keep_their_share_of_the_hidden_size() -> None:
    experts = {"num_experts": 128, "moe_ffn_hidden_size": 2048, "moe_latent_size": 1024}
    small = shrunk(RunConfig.from_flat(LLAMA_8B | experts), [Layout(tp=2)]).model
    assert (small.hidden_size, small.moe_ffn_hidden_size, small.moe_latent_size) == (64, 32, 16)


def test_packed_documents_stay() -> None:
    packed = {"reset_position_ids": True, "reset_attention_mask": True, "fim_data": True, "fim_no_prefix": "#"}
    large = RunConfig.from_flat(LLAMA_8B | packed)
    for small in (shrunk(large, [Layout(tp=2)]), at_full_size(RunConfig.from_flat(GPT2 | packed), 50257)):
        assert small.data.reset_position_ids and small.data.reset_attention_mask and not small.value("fim_data")
        assert list(problems(configured(small, Layout(tp=2), "float64"), 2)) == []
        assert packing_of(small.data, tokenizer_of(small.data)).eod == small.data.vocab_size - 1


@pytest.mark.parametrize(
    "given", [{"dpo": True, "dpo_beta": 0.5, "load_hf": "model"}, {"sft": True, "sft_packing": "first_fit"}]
)
def test_fine_tuning_is_compared_without_its_files(given: dict[str, object]) -> None:
    evaluated = {"choices_data_path": ("facts.jsonl",), "full_validation": True}
    small = shrunk(RunConfig.from_flat(LLAMA_8B | given | evaluated), [Layout(tp=2)])
    assert list(problems(configured(small, Layout(tp=2), "float64"), 2)) == []


def test_layers_and_heads_up_to_eight_are_kept() -> None:
    small = shrunk(RunConfig.from_flat({"num_layers": 8, "num_attention_heads": 8}), [Layout()])
    assert (small.model.num_layers, small.model.num_attention_heads) == (8, 8)


def test_all_layouts_of_eight_ranks_fit_eight_layers_and_heads() -> None:
    """Counted by hand: sp doubles layouts with tp; four ZeRO stages and overlap make eight of those with dp."""
    config = shrunk(RunConfig.from_flat({"num_layers": 8, "num_attention_heads": 8}), [Layout()])
    found = {size: sum(layout.cp == 1 for layout in fitting_layouts(config, size)) for size in (2, 4, 8)}
    assert found[2] == 2 + 4 + 8
    assert found[4] == 2 + 2 * 4 + 2 * 8 + 2 + 4 * 8 + 8
    without_tp_or_dp = {2: 4, 4: 2, 8: 1}  # chunks possible with 8 layers
    assert found[8] == (
        (2 + 2 * without_tp_or_dp[2] + 2 * without_tp_or_dp[4] + without_tp_or_dp[8])
        + 8 * (2 + 2 * without_tp_or_dp[2] + without_tp_or_dp[4])
        + 8 * (2 + without_tp_or_dp[2])
        + 8
    )


def test_layouts_that_do_not_fit_are_left_out() -> None:
    config = shrunk(RunConfig.from_flat({"num_layers": 2, "num_attention_heads": 2}), [Layout()])
    assert {str(layout) for layout in fitting_layouts(config, 4)}.isdisjoint({"tp4", "tp4 sp", "pp4", "pp2 v2 dp2"})
    assert Layout.parse("tp2 pp2 sp") in fitting_layouts(config, 4)


def test_full_size_keeps_all_sizes() -> None:
    full = at_full_size(RunConfig.from_flat(GPT2), 50257)
    assert full.model == RunConfig.from_flat(GPT2).model
    assert (full.data.vocab_size, full.data.seq_length) == (50257, 1024)
    with pytest.raises(ConfigError, match="vocabulary"):
        full_size_model(RunConfig())
