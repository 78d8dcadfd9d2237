"""dots.llm1: Qwen3's attention, and experts as those of DeepSeek-V3."""

from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.glm import SIGMOID_ROUTING, SIGMOID_ROUTING_KEYS
from megatron_core.hub.hugging_face.families.llama import LLAMA, QK_NORMS
from megatron_core.hub.hugging_face.families.qwen import WINDOWS_OF_LAST_LAYERS
from megatron_core.hub.hugging_face.rules import (
    EXPERT_BIAS,
    EXPERT_MATRICES,
    GROUPS_BY_TWO,
    ROPE,
    SHARED_MATRICES,
    dense_first,
)

DOTS1 = variant(
    LLAMA,
    model_type="dots1",
    class_name="Dots1ForCausalLM",
    keys=SIGMOID_ROUTING_KEYS,
    fixed={**SIGMOID_ROUTING, "qk_layernorm": True},
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
    rules=(ROPE, dense_first(dense=0), GROUPS_BY_TWO, WINDOWS_OF_LAST_LAYERS),
    layer_tensors={**QK_NORMS, **EXPERT_MATRICES, **EXPERT_BIAS, **SHARED_MATRICES},
)
