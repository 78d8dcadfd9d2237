"""DeepSeek-V2, V3 and V3.2, and GLM-5: latent attention, choices of experts, and indexers."""

from megatron_core.config import ModelConfig
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.foreign_json import COUNT, STRING, STRINGS, WIDTH
from megatron_core.hub.hugging_face.rules import (
    GROUP_TYPES,
    KeyRule,
    Settings,
    groups_json,
    limited_to_groups,
    refuse,
    rope_parameters,
    rope_type,
)


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
    head_dim = config.section(LatentAttentionConfig).qk_pos_emb_head_dim
    return {"num_key_value_heads": config.num_attention_heads, "head_dim": head_dim}


LATENT_POSITIONS = KeyRule(_check_positions, _heads_json, {"head_dim": WIDTH, "num_key_value_heads": COUNT})


GREEDY = "greedy"
LIMITED = "group_limited_greedy"


def _groups(hf_config: Settings) -> Settings:
    """``topk_method``: the best experts of all groups, or of the groups with the best experts."""
    method = hf_config["topk_method"]
    if method not in (GREEDY, LIMITED):
        refuse("topk_method", method, f"for deepseek_v2 supported are {GREEDY} and {LIMITED}")
    return {} if method == GREEDY else limited_to_groups(hf_config["n_group"], hf_config["topk_group"], 1)


def _groups_json(config: MoEConfig) -> Settings:
    return groups_json(config) | {"topk_method": GREEDY if config.group_score_topk is None else LIMITED}


GROUPS_OF_V2 = KeyRule(_groups, _groups_json, {**GROUP_TYPES, "topk_method": STRING})

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


def _expert_layers_json(config: MoEConfig) -> Settings:
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
