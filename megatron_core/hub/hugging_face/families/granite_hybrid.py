"""Granite 4: layers of a Mamba-2 mixer or attention, and an MLP or experts, which are two layers each here."""

from megatron_core.config import ModelConfig
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.foreign_json import COUNT_OR_ZERO, NUMBER, STRING, STRINGS, WIDTH
from megatron_core.hub.hugging_face.families.bamba import MIXER_KEYS, MIXER_TYPES, mixer_sizes, mixer_sizes_json
from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, Settings, refuse

KINDS = {"mamba": "M", "attention": "*", "linear_attention": "M", "full_attention": "*"}
"""Values of ``layer_types`` -> letters of the pattern; export writes the first two, which all releases read."""
UNUSED_MIXER = {"mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 2}
"""Sizes of mixers in a config.json without any, because transformers checks them."""
WITHOUT_POSITIONS = "nope"
"""``position_embedding_type`` of published models without positions."""


def _layers(hf_config: Settings) -> Settings:
    count = hf_config["num_hidden_layers"]
    kinds = hf_config.get("layer_types", ["mamba"] * count)
    if len(kinds) != count or set(kinds) - set(KINDS):
        refuse("layer_types", kinds, f"it must have one of {', '.join(KINDS)} for each of {count} layers")
    mlp = "E" if hf_config["num_local_experts"] else "-"
    pattern = "".join(KINDS[layer_type] + mlp for layer_type in kinds)
    settings = {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}
    if "M" not in pattern:
        return settings
    return settings | {name: hf_config[key] for key, name in MIXER_KEYS.items()} | mixer_sizes(hf_config)


def _layers_json(config: ModelConfig) -> Settings:
    config = config.section(RecurrentConfig)
    kinds = ["attention" if letter == "*" else "mamba" for letter in (config.hybrid_layer_pattern or "")[::2]]
    keys = {"num_hidden_layers": config.num_layers // 2, "layer_types": kinds}
    if not config.has_mamba:
        return keys | UNUSED_MIXER
    return keys | {key: getattr(config, name) for key, name in MIXER_KEYS.items()} | mixer_sizes_json(config)


def _mlps(hf_config: Settings) -> Settings:
    """The width of MLPs, or of experts, each layer of which also has a shared one."""
    shared = hf_config["shared_intermediate_size"]
    if not hf_config["num_local_experts"]:
        return {"ffn_hidden_size": shared}
    return {
        "num_experts": hf_config["num_local_experts"],
        "moe_router_topk": hf_config["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf_config["intermediate_size"],
        "moe_shared_expert_intermediate_size": shared,
        "moe_aux_loss_coeff": float(hf_config["router_aux_loss_coef"]),
    }


def _mlps_json(config: MoEConfig) -> Settings:
    if config.num_experts is None:
        sizes = dict.fromkeys(("intermediate_size", "shared_intermediate_size"), config.ffn_size)
        return {"num_local_experts": 0, "num_experts_per_tok": 0, **sizes}
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "intermediate_size": config.expert_ffn_size,
        "shared_intermediate_size": config.moe_shared_expert_intermediate_size,
        "router_aux_loss_coef": config.moe_aux_loss_coeff,
    }


def _positions(hf_config: Settings) -> Settings:
    embedding_type = hf_config.get("position_embedding_type")
    if embedding_type not in ("rope", WITHOUT_POSITIONS, None):
        refuse("position_embedding_type", embedding_type, f"supported are rope, and {WITHOUT_POSITIONS} or null")
    return ROPE.read(hf_config) if embedding_type == "rope" else {"position_embedding_type": "none"}


def _positions_json(config: ModelConfig) -> Settings:
    if config.position_embedding_type != "rope":
        return {"position_embedding_type": WITHOUT_POSITIONS}
    return ROPE.write(config) | {"position_embedding_type": "rope"}


LAYERS = KeyRule(_layers, _layers_json, {**MIXER_TYPES, "layer_types": STRINGS})
MLPS = KeyRule(
    _mlps,
    _mlps_json,
    {
        **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), COUNT_OR_ZERO),
        **dict.fromkeys(("intermediate_size", "shared_intermediate_size"), WIDTH),
        "router_aux_loss_coef": NUMBER,
    },
)
POSITIONS = KeyRule(_positions, _positions_json, {**ROPE.types, "position_embedding_type": STRING})
