"""DeepSeek-V3.2 and GLM-5: the layers of DeepSeek-V3 with attention to the keys that an indexer selects.
GLM-4.7-Flash: the layers of DeepSeek-V3 with another epsilon outside of the latents."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.deepseek_v3 import DEEPSEEK_V3, LATENT_POSITIONS
from megatron_core.hub.hugging_face.rules import GROUPS_BY_TWO, ROPE, KeyRule, Settings, dense_first, refuse
from megatron_core.hub.hugging_face.tensors import TensorSource
from megatron_core.schema import STRINGS

INDEXED = "indexed_attention"
SPARSE = "sparse"
DENSE = "dense"
FULL = "full"


def _layer_types(hf_config: Settings) -> Settings:
    """``mlp_layer_types`` of the layers; all of them have an indexer of their own."""
    for key, only in (("layer_types", INDEXED), ("indexer_types", FULL)):
        if set(hf_config.get(key, ())) - {only}:
            refuse(key, hf_config[key], f"for {hf_config.get('model_type')} only {only} is supported")
    pattern = hf_config.get("index_topk_pattern")
    if hf_config.get("index_topk_freq", 1) != 1:
        refuse("index_topk_freq", hf_config["index_topk_freq"], "only 1 is supported: an indexer in every layer")
    if pattern is not None and (
        not isinstance(pattern, str | list) or any(letter not in ("F", FULL) for letter in pattern)
    ):
        refuse("index_topk_pattern", pattern, "only F (full) is supported: an indexer in every layer")
    interleaved = hf_config.get("model_type") == "glm_moe_dsa"
    for key, value in (("rope_interleave", True), ("indexer_rope_interleave", interleaved)):
        if hf_config.get(key, value) != value:
            refuse(key, hf_config[key], f"for {hf_config.get('model_type')} only {value} is supported")
    kinds = hf_config.get("mlp_layer_types")
    if set(kinds or ()) - {SPARSE, DENSE}:
        refuse("mlp_layer_types", kinds, f"supported are {SPARSE} and {DENSE}")
    return {} if kinds is None else {"moe_layer_freq": tuple(int(mlp_type == SPARSE) for mlp_type in kinds)}


def _layer_types_json(config: ModelConfig) -> Settings:
    kinds = [SPARSE if config.has_experts(layer) else DENSE for layer in range(config.num_layers)]
    return {"mlp_layer_types": kinds, "layer_types": [INDEXED] * config.num_layers}


LAYER_TYPES = KeyRule(
    _layer_types, _layer_types_json, dict.fromkeys(("mlp_layer_types", "layer_types", "indexer_types"), STRINGS)
)
INDEXER = "self_attention.core_attention.indexer"
INDEXER_MATRICES: dict[str, str | TensorSource] = {
    f"{INDEXER}.linear_wq_b": "self_attn.indexer.wq_b",
    f"{INDEXER}.linear_wk": "self_attn.indexer.wk",
    f"{INDEXER}.k_norm": "self_attn.indexer.k_norm",
    f"{INDEXER}.linear_weights_proj": "self_attn.indexer.weights_proj",
}

DEEPSEEK_V32 = variant(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    class_name="DeepseekV32ForCausalLM",
    keys={
        "index_n_heads": "dsa_indexer_n_heads",
        "index_head_dim": "dsa_indexer_head_dim",
        "index_topk": "dsa_indexer_topk",
    },
    fixed={"experimental_attention_variant": "dsa"},
    required={
        **{key: only for key, only in DEEPSEEK_V3.required.items() if key != "rope_interleave"},
        "mlp_bias": False,
    },
    rules=(ROPE, LATENT_POSITIONS, dense_first(dense=3, shared=1), LAYER_TYPES, GROUPS_BY_TWO),
    layer_tensors=INDEXER_MATRICES,
)
GLM_MOE_DSA = variant(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    class_name="GlmMoeDsaForCausalLM",
    keys={"rms_norm_eps": "norm_epsilon"},
    defaults={**DEEPSEEK_V32.defaults, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1},
    fixed={
        "norm_epsilon": None,
        "latent_norm_epsilon": 1e-6,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_rope_interleaved": True,
    },
    required={key: only for key, only in DEEPSEEK_V32.required.items() if key != "rms_norm_eps"},
)


def _expert_layers(hf_config: Settings) -> Settings:
    """``mlp_layer_types`` of the layers."""
    kinds = hf_config.get("mlp_layer_types")
    layers = hf_config["num_hidden_layers"]
    if kinds is not None and (set(kinds) - {SPARSE, DENSE} or len(kinds) != layers):
        refuse("mlp_layer_types", kinds, f"supported are {SPARSE} and {DENSE}, one for each layer")
    return {} if kinds is None else {"moe_layer_freq": tuple(int(mlp_type == SPARSE) for mlp_type in kinds)}


def _expert_layers_json(config: ModelConfig) -> Settings:
    return {"mlp_layer_types": [SPARSE if config.has_experts(n) else DENSE for n in range(config.num_layers)]}


EXPERT_LAYERS = KeyRule(_expert_layers, _expert_layers_json, {"mlp_layer_types": STRINGS})
"""``mlp_layer_types``, which takes precedence over ``first_k_dense_replace``."""

GLM4_MOE_LITE = variant(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    keys={"rms_norm_eps": "norm_epsilon"},
    fixed={"norm_epsilon": None, "latent_norm_epsilon": 1e-6},
    aliases={"num_local_experts": "n_routed_experts"},
    defaults={"num_key_value_heads": 20, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
    required={key: only for key, only in DEEPSEEK_V3.required.items() if key != "rms_norm_eps"},
    rules=(ROPE, LATENT_POSITIONS, dense_first(dense=1, shared=1), EXPERT_LAYERS, GROUPS_BY_TWO),
)
