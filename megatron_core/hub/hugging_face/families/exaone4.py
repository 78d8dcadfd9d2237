"""EXAONE 4: norms behind attention and MLP, norms of queries and keys, and positions only in layers with a window.
K-EXAONE: norms before attention and MLP, and experts as those of DeepSeek-V3."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.deepseek_v32 import EXPERT_LAYERS
from megatron_core.hub.hugging_face.families.glm import SIGMOID_ROUTING, SIGMOID_ROUTING_KEYS
from megatron_core.hub.hugging_face.families.llama import LLAMA, QK_NORMS
from megatron_core.hub.hugging_face.families.olmo2 import OLMO2
from megatron_core.hub.hugging_face.rules import (
    EXPERT_MATRICES,
    GROUPS_BY_TWO,
    ROPE,
    SHARED_MATRICES,
    WINDOWS,
    KeyRule,
    Settings,
    dense_first,
    refuse,
)
from megatron_core.schema import COUNT_OR_ZERO, KeyType

PATTERN = KeyType("a string or an integer >= 0", lambda value: isinstance(value, str) or COUNT_OR_ZERO.accepts(value))


def _windows(hf_config: Settings) -> Settings:
    """Every n-th layer, ``sliding_window_pattern``, has neither window nor positions; without windows all have them."""
    if hf_config.get("sliding_window") is None:
        return {}
    every = hf_config.get("sliding_window_pattern", 4)
    layers = hf_config["num_hidden_layers"]
    if "layer_types" not in hf_config and (isinstance(every, str) or every == 0):
        refuse("sliding_window_pattern", every, "without layer_types it must be an integer >= 1")
    kinds = hf_config.get("layer_types") or [
        "full_attention" if n % every == 0 else "sliding_attention" for n in range(1, layers + 1)
    ]
    without = tuple(int(layer_type == "full_attention") for layer_type in kinds)
    return {**WINDOWS.read({**hf_config, "layer_types": kinds}), "no_rope_freq": without if any(without) else None}


def _windows_json(config: ModelConfig) -> Settings:
    return {"layer_types": ["full_attention"] * config.num_layers, **WINDOWS.write(config)}


WINDOWS_WITH_POSITIONS = KeyRule(_windows, _windows_json, {**WINDOWS.types, "sliding_window_pattern": PATTERN})

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
