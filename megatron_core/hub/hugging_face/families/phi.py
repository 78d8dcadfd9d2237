"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel with one norm, biases everywhere, rotary positions in a part
of each head's channels. Phi-3: Llama with fused matrices, also with LongRoPE. Phi-3.5-MoE: Mixtral with LayerNorm,
optional biases, and experts that are chosen one after the other (sparsemixer)."""

from dataclasses import replace

from megatron_core.config import ModelConfig
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.foreign_json import NUMBER
from megatron_core.hub.hugging_face.rules import (
    LONGROPE_MSCALES,
    PARTIAL_ROPE,
    ROPE,
    KeyRule,
    Settings,
    refuse,
    rope_parameters,
    rope_type,
)


def _phi3_positions(hf_config: Settings) -> Settings:
    """Early files say su or yarn, which mean longrope."""
    rope = rope_parameters(hf_config)
    scaling = rope_type(rope)
    if scaling not in ("default", "longrope", "su", "yarn"):
        refuse("rope_type", scaling, "for phi3 supported are default and longrope")
    return PARTIAL_ROPE.read(hf_config if scaling == "default" else {**hf_config, "rope_scaling": rope | LONGROPE})


LONGROPE = {"rope_type": "longrope"}


def _phimoe_positions(hf_config: Settings) -> Settings:
    """LongRoPE has a magnitude for short and one for long texts."""
    rope = rope_parameters(hf_config)
    scaling = rope_type(rope)
    if scaling == "default":
        return ROPE.read(hf_config)
    if scaling != "longrope" or any(rope.get(key) is None for key in LONGROPE_MSCALES):
        refuse("rope_type", scaling, "for phimoe supported are default, and longrope with short_mscale and long_mscale")
    parameters = {key: value for key, value in rope.items() if key not in (*LONGROPE_MSCALES, "attention_factor")}
    scales = {setting: float(rope[key]) for key, setting in LONGROPE_MSCALES.items()}
    return ROPE.read({**hf_config, "rope_scaling": parameters}) | scales


def _phimoe_positions_json(config: ModelConfig) -> Settings:
    keys = ROPE.write(config)
    if config.longest_text_scales_rotary:
        key = "original_max_position_embeddings"
        scaling = {name: value for name, value in keys["rope_scaling"].items() if name != "attention_factor"}
        scales = {name: getattr(config, setting) for name, setting in LONGROPE_MSCALES.items()}
        keys["rope_scaling"] = {**scaling, **scales, key: keys[key]}
    return keys


def _routing(hf_config: Settings) -> Settings:
    if hf_config["num_experts_per_tok"] != 2:
        refuse("num_experts_per_tok", hf_config["num_experts_per_tok"], "transformers chooses 2 in any case")
    return {
        "moe_sparsemixer_threshold": float(hf_config["router_jitter_noise"]),
        "moe_input_jitter_eps": float(hf_config["input_jitter_noise"]) or None,
    }


def _routing_json(config: MoEConfig) -> Settings:
    return {
        "router_jitter_noise": config.moe_sparsemixer_threshold,
        "input_jitter_noise": config.moe_input_jitter_eps or 0.0,
    }


POSITIONS_OF_PHI3 = replace(PARTIAL_ROPE, read=_phi3_positions)
POSITIONS_OF_PHIMOE = KeyRule(_phimoe_positions, _phimoe_positions_json, ROPE.types)
ROUTING = KeyRule(_routing, _routing_json, {"router_jitter_noise": NUMBER, "input_jitter_noise": NUMBER})
