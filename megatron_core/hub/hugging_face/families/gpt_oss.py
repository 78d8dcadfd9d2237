"""gpt-oss: attention sinks, windows in every second layer, experts with biases and bounded activations, YaRN."""

from dataclasses import replace

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.rules import ROPE, Settings, windows_where

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""``rope_parameters`` of transformers if config.json has none."""


def _rope(hf_config: Settings) -> Settings:
    has_rope = "rope_scaling" in hf_config or "rope_parameters" in hf_config
    return ROPE.read(hf_config if has_rope else {**hf_config, "rope_parameters": YARN})


def _rope_json(config: ModelConfig) -> Settings:
    keys = ROPE.write(config)
    if keys["rope_scaling"] is None:  # which would mean YaRN
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rotary_base}
    return keys


POSITIONS = replace(ROPE, read=_rope, write=_rope_json)
WINDOWS = windows_where(lambda _, layer: layer % 2 == 0)
