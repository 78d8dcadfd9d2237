"""EXAONE 4: norms behind attention and MLP, norms of queries and keys, and positions only in layers with a window.
K-EXAONE: norms before attention and MLP, and experts as those of DeepSeek-V3."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.deepseek import EXPERT_LAYERS
from megatron_core.hub.hugging_face.families.glm import SIGMOID_ROUTING, SIGMOID_ROUTING_KEYS
from megatron_core.hub.hugging_face.families.llama import LLAMA, QK_NORMS
from megatron_core.hub.hugging_face.families.olmo2 import OLMO2
from megatron_core.hub.hugging_face.rules import (
    EXPERT_MATRICES,
    GROUPS_BY_TWO,
    ROPE,
    SHARED_MATRICES,
    WINDOWS_WITH_POSITIONS,
    KeyRule,
    Settings,
    dense_first,
)

EXAONE4 = register(
    OLMO2,
    model_type="exaone4",
    class_name="Exaone4ForCausalLM",
    keys=LLAMA.keys,
    fixed={**LLAMA.fixed, "qk_layernorm": True, "norm_placement": "post"},
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    required={"hidden_act": "silu"},
    rules=(ROPE, WINDOWS_WITH_POSITIONS),
    layer_tensors={**OLMO2.layer_tensors, **QK_NORMS},
)


def _first_layers_json(config: ModelConfig) -> Settings:
    keys = FIRST_LAYERS.write(config)
    return {"first_k_dense_replace": keys["first_k_dense_replace"], "num_shared_experts": keys["n_shared_experts"]}


FIRST_LAYERS = dense_first(dense=1, shared=1)
EXAONE_MOE = variant(
    LLAMA,
    model_type="exaone_moe",
    class_name="ExaoneMoeForCausalLM",
    keys={
        **{key: name for key, name in SIGMOID_ROUTING_KEYS.items() if key != "n_routed_experts"},
        "num_experts": "num_experts",
    },
    fixed={**SIGMOID_ROUTING, "qk_layernorm": True},
    aliases={"num_shared_experts": "n_shared_experts", "n_routed_experts": "num_experts"},
    defaults={
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    rules=(
        ROPE,
        WINDOWS_WITH_POSITIONS,
        KeyRule(FIRST_LAYERS.read, _first_layers_json, FIRST_LAYERS.types),
        EXPERT_LAYERS,
        GROUPS_BY_TWO,
    ),
    layer_tensors={
        **QK_NORMS,
        **EXPERT_MATRICES,
        "mlp.router.expert_bias": "mlp.e_score_correction_bias",
        **SHARED_MATRICES,
    },
    mtp_names=r"mtp\..*",  # transformers does not read them either
)
