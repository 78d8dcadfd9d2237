"""DeepSeek-V2: latent attention, and experts whose scores are a softmax."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import register
from megatron_core.hub.hugging_face.families.deepseek_v3 import DEEPSEEK_V3, LATENT_MATRICES, LATENT_POSITIONS
from megatron_core.hub.hugging_face.rules import (
    EXPERT_MATRICES,
    GROUP_TYPES,
    ROPE,
    SHARED_MATRICES,
    KeyRule,
    Settings,
    dense_first,
    groups_json,
    limited_to_groups,
    refuse,
)
from megatron_core.schema import STRING

GREEDY = "greedy"
LIMITED = "group_limited_greedy"


def _groups(hf_config: Settings) -> Settings:
    """``topk_method``: the best experts of all groups, or of the groups with the best experts."""
    method = hf_config["topk_method"]
    if method not in (GREEDY, LIMITED):
        refuse("topk_method", method, f"for deepseek_v2 supported are {GREEDY} and {LIMITED}")
    return {} if method == GREEDY else limited_to_groups(hf_config["n_group"], hf_config["topk_group"], 1)


def _groups_json(config: ModelConfig) -> Settings:
    return groups_json(config) | {"topk_method": GREEDY if config.group_score_topk is None else LIMITED}


DEEPSEEK_V2 = register(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    fixed={
        **DEEPSEEK_V3.fixed,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": False,
    },
    aliases={"num_experts": "n_routed_experts"},
    defaults={"topk_method": GREEDY, "routed_scaling_factor": 1.0},
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
    },
    rules=(
        ROPE,
        LATENT_POSITIONS,
        dense_first(dense=0, shared=2),
        KeyRule(_groups, _groups_json, {**GROUP_TYPES, "topk_method": STRING}),
    ),
    layer_tensors={**LATENT_MATRICES, **EXPERT_MATRICES, **SHARED_MATRICES},
    mtp_layer_keys=(),
)
