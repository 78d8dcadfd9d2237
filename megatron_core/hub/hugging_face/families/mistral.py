"""Mistral: Llama with a sliding window; Mixtral: Mistral with experts. Ministral: windows in some layers. Ministral 3:
queries with a temperature. Code World Model: Llama with windows."""

from dataclasses import replace

from megatron_core.config import ModelConfig
from megatron_core.features.positions.settings import PositionConfig
from megatron_core.foreign_json import NUMBER
from megatron_core.hub.hugging_face.rules import (
    ROPE,
    ROPE_PARAMETERS,
    WINDOWS,
    KeyRule,
    Settings,
    refuse,
    rope_parameters,
    windows_where,
)


def windows_with_size_json(config: ModelConfig) -> Settings:
    """Always a size of windows, which transformers needs, even if no layer has a window."""
    kinds = {
        "sliding_window": config.max_position_embeddings or 4096,
        "layer_types": ["full_attention"] * config.num_layers,
    }
    return kinds if config.window_size is None else WINDOWS.write(config)


BETA = "llama_4_scaling_beta"
ORIGINAL = "original_max_position_embeddings"


def _temperature(hf_config: Settings) -> Settings:
    """Positions, and the temperature of queries, which counts in steps of the original positions."""
    rope = rope_parameters(hf_config)
    settings = ROPE.read(hf_config)
    beta = rope.get(BETA)
    if not beta:
        return settings
    floor = rope.get(ORIGINAL) or refuse(BETA, beta, f"it needs {ORIGINAL} in the same object")
    return {
        **settings,
        "query_temperature_scale": float(beta),
        "query_temperature_floor": floor,
        "query_temperature_of_rotary": True,
    }


def _temperature_json(config: ModelConfig) -> Settings:
    keys = ROPE_PARAMETERS.write(config)
    positions = config.section(PositionConfig)
    original = {ORIGINAL: positions.query_temperature_floor} if positions.query_temperature_scale else {}
    parameters = {key: value for key, value in keys["rope_parameters"].items() if value is not None}
    return {**keys, "rope_parameters": original | parameters | {BETA: positions.query_temperature_scale}}


WINDOWS_WITH_SIZE = KeyRule(WINDOWS.read, windows_with_size_json, WINDOWS.types)
POSITIONS_WITH_TEMPERATURE = KeyRule(_temperature, _temperature_json, {**ROPE.types, BETA: NUMBER})
WINDOWS_OF_THREE_IN_FOUR = replace(windows_where(lambda _, layer: layer % 4 != 0), write=windows_with_size_json)
"""Every fourth layer, from the first on, has no window."""
