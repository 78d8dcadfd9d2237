"""SmolLM3: Llama without positions in every fourth layer."""

from megatron_core.config import ModelConfig
from megatron_core.foreign_json import COUNT, COUNTS, SWITCH
from megatron_core.hub.hugging_face.families.qwen import windows_json
from megatron_core.hub.hugging_face.rules import WINDOWS, KeyRule, Settings, refuse


def _positions(hf_config: Settings) -> list[int]:
    """1 for each layer with rotary positions, 0 for one without."""
    layers = hf_config["num_hidden_layers"]
    every = hf_config.get("no_rope_layer_interval", 4)
    kinds: list[int] = hf_config.get("no_rope_layers", [int((n + 1) % every != 0) for n in range(layers)])
    if len(kinds) != layers or not set(kinds) <= {0, 1}:
        refuse("no_rope_layers", kinds, "it must have 0 or 1 for each layer")
    return kinds


def _positions_json(config: ModelConfig) -> Settings:
    """``no_rope_layers``, which has 1 for each layer with positions."""
    return {"no_rope_layers": [int(config.has_rotary(n)) for n in range(config.num_layers)]}


def _no_rope_freq(hf_config: Settings) -> Settings:
    """The layers without positions, from ``no_rope_layers`` or ``no_rope_layer_interval``."""
    kinds = _positions(hf_config)
    return {"no_rope_freq": None if all(kinds) else tuple(int(not has_positions) for has_positions in kinds)}


POSITION_TYPES = {"no_rope_layers": COUNTS, "no_rope_layer_interval": COUNT}
POSITIONS = KeyRule(_no_rope_freq, _positions_json, POSITION_TYPES)
"""Layers without positions."""


def _windows(hf_config: Settings) -> Settings:
    """Layers without positions have a window if ``use_sliding_window`` is set."""
    if not hf_config.get("use_sliding_window", False):
        return {}
    kinds = ["full_attention" if has_positions else "sliding_attention" for has_positions in _positions(hf_config)]
    return WINDOWS.read({"layer_types": kinds, **hf_config})


WINDOWS_WITHOUT_POSITIONS = KeyRule(_windows, windows_json, {**WINDOWS.types, "use_sliding_window": SWITCH})
