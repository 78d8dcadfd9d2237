"""OLMo 2: Llama with norms behind attention and MLP, and norms of queries and keys over all heads. OLMo 3: with
windows in some layers. OLMoE: with these norms of queries and keys, and with experts."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.families.gemma import ROPE_TYPES, rope_by_layer_type
from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, Settings, windows_where

THETA = 500000.0
"""Base of rotary positions of OLMo 3; of layers with a window if config.json does not name theirs."""


def _positions(hf_config: Settings) -> Settings:
    """Layers with a window have positions of their own, which are not scaled."""
    settings = rope_by_layer_type({"rope_theta": THETA, "rope_local_base_freq": THETA, **hf_config})
    plain = settings.keys() == {"rotary_base", "rotary_percent", "rotary_base_of_windows"}
    if plain and settings["rotary_base"] == settings["rotary_base_of_windows"]:
        settings.pop("rotary_base_of_windows")
    return settings


def _positions_json(config: ModelConfig) -> Settings:
    """In the form of earlier releases if it has the same meaning."""
    full = ROPE.write(config)
    local = config.rotary_base_of_windows or config.rotary_base
    if full["rope_theta"] == local == THETA:
        return full
    return by_layer_type_json(config)


def by_layer_type_json(config: ModelConfig) -> Settings:
    """The positions of layers with and without a window, as transformers 5 writes them."""
    full = ROPE.write(config)
    scaling = full["rope_scaling"] or {"rope_type": "default"}
    local = config.rotary_base_of_windows or config.rotary_base
    return {
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": full["rope_theta"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


POSITIONS = KeyRule(_positions, _positions_json, ROPE_TYPES)
WINDOWS = windows_where(lambda _, layer: layer % 4 != 3)
