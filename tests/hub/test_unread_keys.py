"""Keys of config.json that change a model elsewhere are named, and files of supported models give no false alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from megatron_core.hub.conversion import import_hugging_face
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES, IGNORED_KEYS
from megatron_core.hub.hugging_face.unread_keys import is_harmless, notes_on_unread_keys
from tests.hub.hf_models import MODELS, save_model, transformers
from tests.hub.test_hugging_face import _edit
from tests.hub.test_recurrences import GRANITE_4_H_TINY, KIMI_48B, LFM2_1B, LFM2_8B, NEMOTRON_H_8B, QWEN3_NEXT_80B

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "vocab_size": 50257,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
GEMMA_2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "eos_token_id": [1, 107], "head_dim": 256,
    "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 8192,
    "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "use_cache": True,
    "sliding_window": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.42.4", "vocab_size": 256000,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {},
    "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "model_type": "deepseek_v3", "ep_size": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
STARCODER2_3B = {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "attention_softmax_in_fp32": True,
    "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042,
    "intermediate_size": 12288, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default",
    "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24,
    "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096, "use_bias": True,
    "vocab_size": 49152,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
}  # fmt: skip
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "cache_implementation": "hybrid", "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "logit_scale": 0.25,
    "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4,
    "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
    "sliding_window": 4096, "sliding_window_pattern": 4, "use_cache": True, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
    "layernorm_full_attention_beta": 1.0, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
    "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
    "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid", "tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": SMOLLM2, "gpt2": GPT2, "gemma-2-2b-it": GEMMA_2_2B, "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3, "starcoder2-3b": STARCODER2_3B, "gpt-oss-20b": GPT_OSS_20B,
    "c4ai-command-r7b": COMMAND_R7B, "MiniMax-M2": MINIMAX_M2, "Kimi-Linear-48B": KIMI_48B,
    "Qwen3-Next-80B": QWEN3_NEXT_80B, "Nemotron-H-8B": NEMOTRON_H_8B, "granite-4.0-h-tiny": GRANITE_4_H_TINY,
    "LFM2-1.2B": LFM2_1B, "LFM2-8B-A1B": LFM2_8B,
}  # fmt: skip
"""Keys of config.json of published models."""


def _notes(hf_config: dict[str, Any]) -> list[str]:
    return list(notes_on_unread_keys(ARCHITECTURES[hf_config["model_type"]], hf_config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_give_no_note(name: str) -> None:
    assert _notes(PUBLISHED[name]) == []


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in CONFIG_MAPPING])
def test_default_configurations_of_transformers_give_no_note(name: str) -> None:
    assert _notes(CONFIG_MAPPING[name]().to_dict()) == []


@pytest.mark.parametrize("name", MODELS)
def test_small_models_give_no_note(name: str) -> None:
    kind, settings = MODELS[name]
    assert _notes(getattr(transformers, f"{kind}Config")(**settings).to_dict()) == []


def test_keys_of_every_class_of_transformers_are_harmless() -> None:
    keys = {*GenerationConfig().to_dict(), *PreTrainedConfig().to_dict()}
    assert {key for key in keys if not is_harmless(key)} <= IGNORED_KEYS | {"model_type"}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0, which has no effect on llama models"),
        ("llama", {"sliding_window": 512}, "it changes the results of "),
        ("llama", {"alibi": True}, "keys without effect on llama models: alibi=True"),
        ("llama", {"my_factor": 2.5, "other": [3]}, "my_factor=2.5, other=[3]; if the authors' code reads"),
        ("gpt2", {"logit_scale": 0.3}, "logit_scale=0.3, which has no effect on gpt2 models"),
        ("llama", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "changes the results of"),
        ("llama", {"rope_parameters": {"my_stretch": 3.0}}, "rope_parameters.my_stretch=3.0"),
        ("mpt", {"attn_config": {"alibi": True, "rope": True}}, "effect on mpt models: attn_config.rope=True; if"),
    ],
)
def test_a_key_that_changes_the_model_is_named(name: str, changes: dict[str, Any], said: str) -> None:
    kind, settings = MODELS[name]
    (note,) = _notes(getattr(transformers, f"{kind}Config")(**settings).to_dict() | changes)
    assert said in note


@pytest.mark.parametrize("value", [None, False, 0, 0.0, [], "", 1, 1.0])
def test_a_feature_that_is_off_is_not_named(value: object) -> None:
    assert _notes(SMOLLM2 | {"attn_logit_softcapping": value, "my_factor": value}) == []


def test_import_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model("llama", tmp_path / "theirs")
    _edit(tmp_path / "theirs", final_logit_softcapping=30.0)
    import_hugging_face(tmp_path / "theirs", tmp_path / "ours", verify=False)
    assert "config.json says final_logit_softcapping=30.0, which has no effect on llama" in capsys.readouterr().out
