"""Cohere 2: windows in most layers, and positions only in these."""

from megatron_core.foreign_json import COUNT
from megatron_core.hub.hugging_face.rules import WINDOWS, WINDOWS_WITH_POSITIONS, KeyRule, Settings


def _windows(hf_config: Settings) -> Settings:
    """Without ``sliding_window`` no layer has positions."""
    if hf_config.get("sliding_window") is not None:
        return WINDOWS_WITH_POSITIONS.read(hf_config)
    WINDOWS.read(hf_config)  # checks layer_types
    return {"no_rope_freq": (1,) * hf_config["num_hidden_layers"]}


WINDOWS_OF_COHERE2 = KeyRule(_windows, WINDOWS_WITH_POSITIONS.write, {**WINDOWS.types, "sliding_window_pattern": COUNT})
