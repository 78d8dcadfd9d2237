"""Models with recurrences against `transformers`, all of whose operations are in float64 here."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.hub.hugging_face import HuggingFaceReader, architecture_for, architecture_of
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES
from megatron_core.inference import Engine, Generator, Request
from megatron_core.parallel import ParallelGroups
from megatron_core.planner.parameters import model_parameters
from tests.hub.hf_models import MODELS, RECURRENT, save_model, transformers
from tests.hub.test_gradients import compare_gradients

NAMES = [name for name in MODELS if name.startswith(RECURRENT)]
MODULES = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "mamba2", "nemotron_h", "bamba", "falcon_h1"),
    *("granitemoehybrid", "lfm2", "lfm2_moe"),
)


class WideTorch:
    """torch, with float64 for float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these models compute in float64 where they convert to float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for module in MODULES:
        monkeypatch.setattr(
            importlib.import_module(f"transformers.models.{module}.modeling_{module}"), "torch", WideTorch()
        )


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_theirs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)
    compare_gradients(name, tmp_path, tolerance=1e-10)


KIMI_48B = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "model_max_length": 1048576,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
    "moe_intermediate_size": 1024, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_expert_group": 1,
    "topk_group": 1, "use_grouped_topk": True, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [n for n in range(1, 27) if n % 4],
    },
}  # fmt: skip
"""The keys of Kimi-Linear-48B-A3B's config.json that have a meaning."""
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "full_attention_interval": 4, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "rope_theta": 10000000, "tie_word_embeddings": False, "partial_rotary_factor": 0.25, "norm_topk_prob": True,
}  # fmt: skip


NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "max_position_embeddings": 8192,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, float("inf")], "use_bias": False, "use_conv_bias": True,
    "mlp_hidden_act": "relu2", "tie_word_embeddings": False,
}  # fmt: skip
NEMOTRON_3_NANO = NEMOTRON_H_8B | {
    "hidden_size": 2688, "num_hidden_layers": 52, "num_key_value_heads": 2, "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "n_group": 1, "topk_group": 1,
    "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
}  # fmt: skip
GRANITE_4_H_TINY = {
    "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536, "num_hidden_layers": 40,
    "layer_types": ["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)], "num_attention_heads": 12,
    "num_key_value_heads": 4, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64,
    "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "position_embedding_type": "nope", "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 6,
    "normalization_function": "rmsnorm", "rms_norm_eps": 1e-5, "rope_theta": 10000, "router_aux_loss_coef": 0.01,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
GRANITE_4_H_350M = GRANITE_4_H_TINY | {
    "hidden_size": 768, "num_hidden_layers": 32, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_d_head": 32,
    "layer_types": ["attention" if n in (10, 13, 17, 27) else "mamba" for n in range(32)], "intermediate_size": 2048,
    "shared_intermediate_size": 2048,
}  # fmt: skip
GRANITE_4_350M = GRANITE_4_H_350M | {
    "hidden_size": 1024, "num_hidden_layers": 28, "layer_types": ["attention"] * 28, "num_attention_heads": 16,
    "position_embedding_type": "rope", "mamba_n_heads": 128, "mamba_d_head": "auto",
}  # fmt: skip
LFM2_1B = {
    "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": False,
    "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    "block_use_swiglu": True, "norm_eps": 1e-5, "rope_theta": 1000000.0, "max_position_embeddings": 128000,
    "use_pos_enc": True, "tie_embedding": True,
}  # fmt: skip
LFM2_350M = LFM2_1B | {"hidden_size": 1024, "num_attention_heads": 16, "block_ff_dim": 6656}
LFM2_8B = {
    "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792, "intermediate_size": 7168, "num_dense_layers": 2, "use_expert_bias": True,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5,
    "layer_types": ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)],
    "rope_theta": 1000000.0, "max_position_embeddings": 128000, "tie_embedding": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("hf_config", "parameters", "attention"),
    [
        (KIMI_48B, 49_122_675_072, [3, 7, 11, 15, 19, 23, 26]),
        (QWEN3_NEXT_80B, 79_674_391_296, list(range(3, 48, 4))),
        (NEMOTRON_H_8B, 8_100_852_736, [7, 18, 29, 40]),
        (NEMOTRON_3_NANO, 31_577_937_344, [5, 12, 19, 26, 33, 42]),
        (GRANITE_4_H_TINY, 6_939_037_248, [10, 30, 50, 70]),
        (GRANITE_4_H_350M, 340_332_224, [20, 26, 34, 54]),
        (GRANITE_4_350M, 352_379_904, list(range(0, 56, 2))),
        (LFM2_1B, 1_170_340_608, [4, 10, 16, 20, 24, 28]),
        (LFM2_350M, 354_483_968, [4, 10, 16, 20, 24, 28]),
        (LFM2_8B, 8_339_929_856, [4, 12, 20, 28, 36, 42]),
    ],
    ids=[
        *("kimi-linear-48b", "qwen3-next-80b", "nemotron-h-8b", "nemotron-3-nano-30b"),
        *("granite-4-h-tiny", "granite-4-h-350m", "granite-4-350m", "lfm2-1.2b", "lfm2-350m", "lfm2-8b-a1b"),
    ],
)
def test_published_models(hf_config: dict[str, Any], parameters: int, attention: list[int]) -> None:
    """Parameters as `transformers` counts them; files of the hub count layers from 1, or give an interval."""
    settings = architecture_of(hf_config).settings(hf_config)
    config = RunConfig.from_flat(settings | {"vocab_size": hf_config["vocab_size"], "seq_length": 4096})
    assert [layer for layer in range(config.model.num_layers) if config.model.has_attention(layer)] == attention
    assert model_parameters(config, hf_config["vocab_size"]) == parameters


@torch.no_grad()
@pytest.mark.parametrize("name", ["granitemoehybrid, experts", "lfm2_moe"])
def test_generated_tokens_are_theirs(name: str, tmp_path: Path) -> None:
    """Prompts of several lengths at once, in chunks, against ``generate``."""
    save_model(name, tmp_path)
    with HuggingFaceReader(tmp_path) as reader:
        generator = Generator.load(reader, reader.config, ParallelGroups.single(), torch.device("cpu"))
    engine, new, prompts = Engine(generator, max_batch_size=3), 8, ([5, 9, 2, 60, 7, 33, 41], [3], [12, 8, 8, 4])
    numbers = [engine.submit(Request(prompt=tuple(prompt), max_new_tokens=new)) for prompt in prompts]
    found: dict[int, list[int | None]] = {number: [] for number in numbers}
    while engine.busy:
        for progress in engine.step():
            found[progress.number].append(progress.token)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    for number, prompt in zip(numbers, prompts, strict=True):
        wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None)
        assert found[number] == wanted[0, len(prompt) :].tolist()


def test_a_limit_of_steps_that_transformers_does_not_read_is_in_a_note() -> None:
    """The code published with Nemotron-H bounds steps by ``time_step_limit``; `transformers` by ``time_step_min``."""
    model = RunConfig.from_flat(architecture_of(NEMOTRON_H_8B).settings(NEMOTRON_H_8B)).model
    assert model.mamba_dt_min == 0.001
    (note,) = ARCHITECTURES["nemotron_h"].notes(NEMOTRON_H_8B, model)
    assert "time_step_limit=[0.0, inf] has no effect" in note and "give --mamba-dt-min 0," in note
    assert not [*ARCHITECTURES["nemotron_h"].notes(NEMOTRON_H_8B, replace(model, mamba_dt_min=0.0))]
    assert not [*ARCHITECTURES["nemotron_h"].notes(NEMOTRON_H_8B | {"time_step_limit": None}, model)]


@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
def test_an_activation_without_mlps_does_not_prevent_export(activation: str) -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "mamba_head_dim": 16, "mamba_num_groups": 2, "hidden_dropout": 0.0}
    fixed = {"position_embedding_type": "none", "normalization": "RMSNorm", "disable_bias_linear": True}
    model = RunConfig.from_flat(sizes | fixed | {"hybrid_layer_pattern": "MM", activation: True}).model
    assert architecture_for(model, "mamba2").changed_settings(model) == {}
    hybrid = replace(model, hybrid_layer_pattern="M-")
    assert ("swiglu" in ARCHITECTURES["nemotron_h"].changed_settings(hybrid)) == (activation == "swiglu")
