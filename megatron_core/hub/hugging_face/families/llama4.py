"""Llama 4 (text): experts on weighted inputs, attention in chunks, layers without positions, norms without weights."""

from megatron_core.config import ModelConfig
from megatron_core.features.positions.settings import PositionConfig
from megatron_core.foreign_json import COUNT, COUNTS, NUMBER, STRINGS, SWITCH, WIDTH
from megatron_core.hub.hugging_face.families.smollm3 import POSITION_TYPES, POSITIONS
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse

CHUNK = 8192
FLOOR = 8192
"""Tokens of a chunk, and positions of one temperature, if config.json has none."""


def _experts(hf_config: Settings) -> Settings:
    """Layers with experts, by their numbers or every n-th; one shared expert has the width of the others."""
    layers = hf_config["num_hidden_layers"]
    every = hf_config.get("interleave_moe_layer_step", 1)
    sparse = hf_config.get("moe_layers", list(range(every - 1, layers, every)))
    return {
        "moe_layer_freq": tuple(int(n in sparse) for n in range(layers)),
        "moe_shared_expert_intermediate_size": hf_config["intermediate_size"],
    }


def _attention(hf_config: Settings) -> Settings:
    """Layers with positions attend within chunks; queries of the others have a temperature."""
    positions = POSITIONS.read(hf_config)
    without = positions["no_rope_freq"] or (0,) * hf_config["num_hidden_layers"]
    size = hf_config.get("attention_chunk_size", CHUNK) if "attention_chunk_size" in hf_config else None
    kinds = ["chunked_attention" if size is not None and not none else "full_attention" for none in without]
    layer_types = hf_config.get("layer_types", kinds)
    if layer_types != kinds and (size is not None or "chunked_attention" in layer_types):
        refuse(
            "layer_types",
            layer_types,
            "layers with positions must have chunked_attention, and the others full_attention",
        )
    tuned = hf_config.get("attn_temperature_tuning", True) and any(without)
    norm = hf_config.get("use_qk_norm", True)
    return {
        **positions,
        "attention_chunk_size": size,
        "query_temperature_scale": float(hf_config.get("attn_scale", 0.1)) if tuned else 0.0,
        "query_temperature_floor": hf_config.get("floor_scale", FLOOR) if tuned else FLOOR,
        "qk_l2_norm": norm,
        "qk_l2_norm_rotary_only": norm,
    }


def _attention_json(config: ModelConfig) -> Settings:
    size = config.attention_chunk_size
    positions = config.section(PositionConfig)
    layers = range(config.num_layers)
    kinds = ["full_attention" if config.chunk_of_layer(n) is None else "chunked_attention" for n in layers]
    return {
        **POSITIONS.write(config),
        "attention_chunk_size": size,
        "layer_types": kinds,
        "attn_temperature_tuning": bool(positions.query_temperature_scale),
        "attn_scale": positions.query_temperature_scale or 0.1,
        "floor_scale": positions.query_temperature_floor,
        "use_qk_norm": config.qk_l2_norm,
    }


ATTENTION_TYPES = {
    **POSITION_TYPES,
    "attention_chunk_size": WIDTH,
    "layer_types": STRINGS,
    "attn_temperature_tuning": SWITCH,
    "attn_scale": NUMBER,
    "floor_scale": WIDTH,
    "use_qk_norm": SWITCH,
}
EXPERTS = KeyRule(
    read=_experts,
    write=lambda config: {"moe_layers": config.expert_layers},
    types={"moe_layers": COUNTS, "interleave_moe_layer_step": COUNT},
)
ATTENTION = KeyRule(_attention, _attention_json, ATTENTION_TYPES)
