"""Qwen2, Qwen2.5: Llama with biases of queries, keys and values. Qwen3: with norms instead. Qwen3-MoE: with experts."""

from megatron_core.config import ModelConfig
from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA, QK_NORMS
from megatron_core.models.hf.rules import (
    COUNT_OR_ZERO,
    ROPE,
    SWITCH,
    WINDOW_OF_ALL_LAYERS,
    WINDOWS,
    Rule,
    Settings,
    refuse,
)
from megatron_core.models.hf.tensors import gate_and_up


def _windows(hf_config: Settings) -> Settings:
    """Layers from ``max_window_layers`` on have a window if ``use_sliding_window`` is set."""
    if not hf_config.get("use_sliding_window", False):
        if "sliding_attention" in hf_config.get("layer_types", ()):
            refuse("use_sliding_window", False, "but layer_types has sliding_attention")
        return {}
    first, layers = hf_config["max_window_layers"], hf_config["num_hidden_layers"]
    kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(layers)]
    return WINDOWS.read({"layer_types": kinds, **hf_config})


def _windows_of_all_layers(hf_config: Settings) -> Settings:
    return WINDOW_OF_ALL_LAYERS.read(hf_config) if hf_config.get("use_sliding_window", False) else {}


def _windows_json(config: ModelConfig) -> Settings:
    return WINDOWS.write(config) | {"use_sliding_window": config.window_size is not None}


WINDOW_TYPES = {**WINDOWS.types, "use_sliding_window": SWITCH, "max_window_layers": COUNT_OR_ZERO}
QWEN_WINDOWS = Rule(_windows, _windows_json, WINDOW_TYPES)
QWEN_MOE_WINDOWS = Rule(_windows_of_all_layers, _windows_json, WINDOW_TYPES)
ROUTER_SOFTMAX = Rule(
    read=lambda hf_config: {"moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False)},
    write=lambda config: {"norm_topk_prob": not config.moe_router_pre_softmax},
    types={"norm_topk_prob": SWITCH},
)
WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}

QWEN2 = register(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    fixed={**LLAMA.fixed, "add_qkv_bias": True},
    defaults=WINDOW_DEFAULTS,
    required={"hidden_act": "silu"},
    rules=(ROPE, QWEN_WINDOWS),
)
QWEN3 = register(
    LLAMA,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    fixed={**LLAMA.fixed, "qk_layernorm": True},
    defaults={**WINDOW_DEFAULTS, "head_dim": 128},
    required={"hidden_act": "silu", "attention_bias": False},
    rules=(ROPE, QWEN_WINDOWS),
    layer_tensors={**LLAMA.layer_tensors, **QK_NORMS},
)
QWEN3_MOE = register(
    QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    keys={
        **LLAMA.keys,
        "num_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
    },
    aliases={"num_local_experts": "num_experts"},
    defaults=WINDOW_DEFAULTS,
    required={"hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    rules=(ROPE, QWEN_MOE_WINDOWS, ROUTER_SOFTMAX),
    layer_tensors={
        **QWEN3.layer_tensors,
        "mlp.router": "mlp.gate",
        "mlp.experts.linear_fc1": gate_and_up("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        "mlp.experts.linear_fc2": "mlp.experts.{e}.down_proj",
    },
)
