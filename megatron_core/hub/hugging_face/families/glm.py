"""GLM-4: Llama with biases of queries, keys and values, and rotary positions of adjacent channels in a part of each
head; GLM-4-0414 with four norms a layer; GLM-4.5 with experts as those of DeepSeek-V3. Solar Open:
Llama with these experts in all layers."""

from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.llama import LLAMA, QK_NORMS
from megatron_core.hub.hugging_face.rules import (
    EXPERT_BIAS,
    EXPERT_MATRICES,
    GROUPS_BY_TWO,
    MTP_LAYERS,
    PARTIAL_ROPE,
    ROPE,
    SHARED_MATRICES,
    dense_first,
)

GLM = variant(
    LLAMA,
    model_type="glm",
    class_name="GlmForCausalLM",
    keys={"attention_bias": "add_qkv_bias"},
    fixed={"rotary_interleaved": True},
    defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    required={"hidden_act": "silu"},
    rules=(PARTIAL_ROPE,),
    layer_tensors={"mlp.linear_fc1": "mlp.gate_up_proj"},
)
GLM4 = variant(
    GLM,
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    fixed={"norm_placement": "sandwich"},
    layer_tensors={
        "post_self_attn_layernorm": "post_self_attn_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_mlp_layernorm",
    },
)
SIGMOID_ROUTING = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""Scores of DeepSeek-V3, from which others take them."""
SIGMOID_ROUTING_KEYS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
GLM4_MOE = variant(
    LLAMA,
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    keys={**SIGMOID_ROUTING_KEYS, "attention_bias": "add_qkv_bias", "use_qk_norm": "qk_layernorm"},
    fixed=SIGMOID_ROUTING,
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={
        "attention_bias": False,
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
        "partial_rotary_factor": 0.5,
        "n_group": 1,
        "topk_group": 1,
    },
    required={"hidden_act": "silu", "norm_topk_prob": True},
    rules=(PARTIAL_ROPE, dense_first(dense=1, shared=1), GROUPS_BY_TWO),
    layer_tensors={**QK_NORMS, **EXPERT_MATRICES, **EXPERT_BIAS, **SHARED_MATRICES},
    mtp_layer_keys=MTP_LAYERS,
)
SOLAR_OPEN = register(
    GLM4_MOE,
    model_type="solar_open",
    class_name="SolarOpenForCausalLM",
    keys={key: name for key, name in GLM4_MOE.keys.items() if key != "use_qk_norm"},
    defaults={
        "attention_bias": False,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    required={"hidden_act": "silu", "norm_topk_prob": True, "first_k_dense_replace": 0, "use_qk_norm": False},
    rules=(ROPE, dense_first(dense=0, shared=1), GROUPS_BY_TWO),
    layer_tensors={**LLAMA.layer_tensors, **EXPERT_MATRICES, **EXPERT_BIAS, **SHARED_MATRICES},
)
