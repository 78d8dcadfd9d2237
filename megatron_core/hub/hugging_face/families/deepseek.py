"""DeepSeek-V3: latent attention, and experts that are chosen in groups with a bias. DeepSeek-V2: experts whose scores
are a softmax. DeepSeek-V3.2 and GLM-5: attention to the keys that an indexer selects. GLM-4.7-Flash: another epsilon
outside of the latents."""

from megatron_core.config import ModelConfig
from megatron_core.features.presets.published import DEEPSEEK_V3_LAYERS
from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import (
    EXPERT_BIAS,
    EXPERT_MATRICES,
    GROUP_TYPES,
    GROUPS_BY_TWO,
    MTP_LAYERS,
    ROPE,
    SHARED_MATRICES,
    KeyRule,
    Settings,
    dense_first,
    groups_json,
    limited_to_groups,
    refuse,
    rope_parameters,
    rope_type,
)
from megatron_core.hub.hugging_face.tensors import TensorSource
from megatron_core.schema import COUNT, STRING, STRINGS, WIDTH


def _check_positions(hf_config: Settings) -> Settings:
    """Refuse channels and scalings of rotary positions that latent attention does not have."""
    if hf_config.get("head_dim", hf_config["qk_rope_head_dim"]) != hf_config["qk_rope_head_dim"]:
        refuse("head_dim", hf_config["head_dim"], f"supported is qk_rope_head_dim={hf_config['qk_rope_head_dim']}")
    heads = hf_config["num_attention_heads"]
    if hf_config.get("num_key_value_heads", heads) != heads:
        refuse("num_key_value_heads", hf_config["num_key_value_heads"], f"supported is num_attention_heads={heads}")
    rope = rope_parameters(hf_config)
    if rope.get("mscale_all_dim") and not (rope_type(rope) == "yarn" and rope.get("mscale")):
        refuse("mscale_all_dim", rope["mscale_all_dim"], "supported is rope_type=yarn with mscale")
    return {}


def _heads_json(config: ModelConfig) -> Settings:
    return {"num_key_value_heads": config.num_attention_heads, "head_dim": config.qk_pos_emb_head_dim}


LATENT_POSITIONS = KeyRule(_check_positions, _heads_json, {"head_dim": WIDTH, "num_key_value_heads": COUNT})
LATENT_MATRICES: dict[str, str | TensorSource] = {
    **LLAMA.layer_tensors,
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}

DEEPSEEK_V3 = register(
    LLAMA,
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "init_method_std",
        "attention_dropout": "attention_dropout",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "v_head_dim": "v_head_dim",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "routed_scaling_factor": "moe_router_topk_scaling_factor",
    },
    defaults={"num_key_value_heads": 128},
    # The norms of the latents always have this epsilon, so that the others must have it, too.
    fixed={**DEEPSEEK_V3_LAYERS, "norm_epsilon": 1e-6},
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    rules=(ROPE, LATENT_POSITIONS, dense_first(dense=3), GROUPS_BY_TWO),
    layer_tensors={**LATENT_MATRICES, **EXPERT_MATRICES, **EXPERT_BIAS, **SHARED_MATRICES},
    mtp_layer_keys=MTP_LAYERS,
)


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


INDEXED = "indexed_attention"
SPARSE = "sparse"
DENSE = "dense"
FULL = "full"


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


def _check_indexers(hf_config: Settings) -> Settings:
    """All layers have an indexer of their own."""
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
    return {}


INDEXERS = KeyRule(
    read=_check_indexers,
    write=lambda config: {"layer_types": [INDEXED] * config.num_layers},
    types=dict.fromkeys(("layer_types", "indexer_types"), STRINGS),
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
    rules=(ROPE, LATENT_POSITIONS, dense_first(dense=3, shared=1), EXPERT_LAYERS, INDEXERS, GROUPS_BY_TWO),
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
