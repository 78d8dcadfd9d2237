"""Published models by name: ``--model-preset llama3-8b`` gives the settings of their shape.

Sources: the configurations that their authors published with the weights.
"""

import difflib
from typing import Any

from megatron_core.errors import ConfigError

Settings = dict[str, Any]

LLAMA_LAYERS: Settings = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""What layers like Llama's are made of."""
DEEPSEEK_V3_LAYERS = LLAMA_LAYERS | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
"""What DeepSeek-V3's layers are made of."""
_LLAMA = LLAMA_LAYERS | {"untie_embeddings_and_output_weights": True}
_GEMMA2 = _LLAMA | {
    "swiglu": False,
    "geglu": True,
    "openai_gelu": True,
    "norm_placement": "sandwich",
    "apply_layernorm_1p": True,
    "scale_embeddings": True,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "untie_embeddings_and_output_weights": False,
    "norm_epsilon": 1e-6,
    "vocab_size": 256000,
    "seq_length": 8192,
}
_NEOX: Settings = {
    "position_embedding_type": "rope",
    "rotary_percent": 0.25,
    "parallel_residual": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 50304,
    "seq_length": 2048,
}
_GPT2: Settings = {"openai_gelu": True, "vocab_size": 50257, "seq_length": 1024}


def _shape(layers: int, hidden: int, heads: int, ffn: int, groups: int | None = None, **further: Any) -> Settings:
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
    shape: Settings = dict(zip(names, (layers, hidden, heads, ffn), strict=True))
    if groups is not None and groups != heads:
        shape |= {"group_query_attention": True, "num_query_groups": groups}
    return shape | further


def _llama3(*shape: int) -> Settings:
    return _LLAMA | _shape(*shape) | {"vocab_size": 128256, "seq_length": 8192, "rotary_base": 500000.0}


def _qwen3(*shape: int, tied: bool = False) -> Settings:
    own = {"qk_layernorm": True, "kv_channels": 128, "norm_epsilon": 1e-6, "rotary_base": 1e6, "vocab_size": 151936}
    return _LLAMA | _shape(*shape) | own | {"seq_length": 4096, "untie_embeddings_and_output_weights": not tied}


def _qwen3_moe(*shape: int, width: int) -> Settings:
    return _qwen3(*shape) | {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": width}


def _mixtral(*shape: int, vocab_size: int) -> Settings:
    own = {"vocab_size": vocab_size, "seq_length": 4096, "rotary_base": 1e6, "num_experts": 8}
    return _LLAMA | _shape(*shape) | own


PRESETS: dict[str, Settings] = {
    "gpt2": _GPT2 | _shape(12, 768, 12, 3072),
    "gpt2-medium": _GPT2 | _shape(24, 1024, 16, 4096),
    "gpt2-large": _GPT2 | _shape(36, 1280, 20, 5120),
    "gpt2-xl": _GPT2 | _shape(48, 1600, 25, 6400),
    "gpt3-175b": _GPT2 | _shape(96, 12288, 96, 49152, seq_length=2048),
    "pythia-160m": _NEOX | _shape(12, 768, 12, 3072),
    "pythia-1.4b": _NEOX | _shape(24, 2048, 16, 8192),
    "llama2-7b": _LLAMA | _shape(32, 4096, 32, 11008, vocab_size=32000, seq_length=4096),
    "llama2-13b": _LLAMA | _shape(40, 5120, 40, 13824, vocab_size=32000, seq_length=4096),
    "llama2-70b": _LLAMA | _shape(80, 8192, 64, 28672, 8, vocab_size=32000, seq_length=4096),
    "llama3-8b": _llama3(32, 4096, 32, 14336, 8),
    "llama3-70b": _llama3(80, 8192, 64, 28672, 8),
    "llama3-405b": _llama3(126, 16384, 128, 53248, 8),
    "smollm2-135m": _LLAMA
    | _shape(30, 576, 9, 1536, 3, vocab_size=49152, seq_length=2048, rotary_base=1e5)
    | {"untie_embeddings_and_output_weights": False},
    "mistral-7b": _LLAMA | _shape(32, 4096, 32, 14336, 8, vocab_size=32000, seq_length=8192, window_size=(4095, 0)),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, 8, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, 8),
    "gemma2-2b": _GEMMA2
    | _shape(26, 2304, 8, 9216, 4, kv_channels=256, window_size=(4095, 0), window_attn_skip_freq=(2,)),
    "gemma2-9b": _GEMMA2
    | _shape(42, 3584, 16, 14336, 8, kv_channels=256, window_size=(4095, 0), window_attn_skip_freq=(2,)),
    "olmo2-7b": _LLAMA
    | _shape(32, 4096, 32, 11008, vocab_size=100352, seq_length=4096, rotary_base=500000.0, norm_epsilon=1e-6)
    | {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_over_heads": True},
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 8, vocab_size=32000),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 8, vocab_size=32768),
    "deepseek-v2-lite": _LLAMA
    | _shape(27, 2048, 16, 10944, vocab_size=102400, seq_length=4096, norm_epsilon=1e-6)
    | {"multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 512}
    | {"num_experts": 64, "moe_router_topk": 6, "moe_ffn_hidden_size": 1408, "moe_router_pre_softmax": True}
    | {"moe_layer_freq": (0,) + (1,) * 26, "moe_shared_expert_intermediate_size": 2816},
    "deepseek-v3": DEEPSEEK_V3_LAYERS
    | _shape(61, 7168, 128, 18432, vocab_size=129280, seq_length=4096, norm_epsilon=1e-6)
    | {"untie_embeddings_and_output_weights": True, "q_lora_rank": 1536, "kv_lora_rank": 512}
    | {"num_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048, "moe_router_topk_scaling_factor": 2.5}
    | {"moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_shared_expert_intermediate_size": 2048}
    | {"moe_layer_freq": (0,) * 3 + (1,) * 58},
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, 4, width=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, 4, width=1536),
}
"""Settings by the name of the model; sequence lengths are those of pretraining."""


def preset(name: str) -> Settings:
    """The settings of a published model. Errors: ``ConfigError`` with similar names for one that is not here."""
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.4)
    meant = f"perhaps you meant {' or '.join(close)}; " if close else ""
    raise ConfigError(f"model_preset={name!r} is not known; {meant}there are: {', '.join(PRESETS)}")
