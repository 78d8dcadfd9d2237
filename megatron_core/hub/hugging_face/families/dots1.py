"""dots.llm1: Qwen3's attention, and experts as those of DeepSeek-V3."""

from megatron_core.hub.hugging_face.architecture import register
from megatron_core.hub.hugging_face.families.glm import SIGMOID_ROUTING, SIGMOID_ROUTING_KEYS
from megatron_core.hub.hugging_face.families.llama import LLAMA, QK_NORMS
from megatron_core.hub.hugging_face.rules import (
    EXPERT_BIAS,
    EXPERT_MATRICES,
    GROUPS_BY_TWO,
    ROPE,
    SHARED_MATRICES,
    WINDOWS,
    Rule,
    Settings,
    dense_first,
)
from megatron_core.schema import COUNT_OR_ZERO


def _windows(hf_config: Settings) -> Settings:
    """Layers from ``max_window_layers`` on have a window."""
    first, layers = hf_config["max_window_layers"], hf_config["num_hidden_layers"]
    kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(layers)]
    return WINDOWS.read({"layer_types": kinds, **hf_config})


DOTS1 = register(
    LLAMA,
    model_type="dots1",
    class_name="Dots1ForCausalLM",
    keys={**LLAMA.keys, **SIGMOID_ROUTING_KEYS},
    fixed={**LLAMA.fixed, **SIGMOID_ROUTING, "qk_layernorm": True},
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    required={"hidden_act": "silu", "attention_bias": False, "norm_topk_prob": True},
    rules=(
        ROPE,
        dense_first(dense=0),
        GROUPS_BY_TWO,
        Rule(_windows, WINDOWS.write, {**WINDOWS.types, "max_window_layers": COUNT_OR_ZERO}),
    ),
    layer_tensors={**LLAMA.layer_tensors, **QK_NORMS, **EXPERT_MATRICES, **EXPERT_BIAS, **SHARED_MATRICES},
)
