"""Phi-3.5-MoE: Mixtral with LayerNorm, optional biases of attention and of the output layer, and experts that are
chosen one after the other (sparsemixer)."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.mistral import MIXTRAL
from megatron_core.hub.hugging_face.rules import (
    ATTENTION_BIASES,
    LONGROPE_MSCALES,
    ROPE,
    WINDOW_OF_ALL_LAYERS,
    KeyRule,
    Settings,
    refuse,
    rope_parameters,
    rope_type,
)
from megatron_core.schema import NUMBER


def _positions(hf_config: Settings) -> Settings:
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


def _positions_json(config: ModelConfig) -> Settings:
    keys = ROPE.write(config)
    if config.has_longrope:
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


def _routing_json(config: ModelConfig) -> Settings:
    return {
        "router_jitter_noise": config.moe_sparsemixer_threshold,
        "input_jitter_noise": config.moe_input_jitter_eps or 0.0,
    }


PHIMOE = variant(
    MIXTRAL,
    model_type="phimoe",
    class_name="PhimoeForCausalLM",
    keys={"lm_head_bias": "add_output_layer_bias"},
    fixed={"normalization": "LayerNorm", "moe_router_score_function": "sparsemixer"},
    defaults={
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "input_jitter_noise": 0.0,
        "lm_head_bias": False,
    },
    required={"hidden_act": "silu", "hidden_dropout": 0.0},
    rules=(
        KeyRule(_positions, _positions_json, ROPE.types),
        WINDOW_OF_ALL_LAYERS,
        ATTENTION_BIASES,
        KeyRule(_routing, _routing_json, {"router_jitter_noise": NUMBER, "input_jitter_noise": NUMBER}),
    ),
)
