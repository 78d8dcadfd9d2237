"""MiniMax-M2: norms of queries and keys over all heads, and experts that are chosen by a sigmoid and a bias."""

from megatron_core.config import ModelConfig
from megatron_core.foreign_json import WIDTH
from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE, KeyRule, Settings


def _positions(hf_config: Settings) -> Settings:
    """``rotary_dim``, the number of rotating channels of a head, is that of published files."""
    channels = hf_config.get("rotary_dim")
    rotated = {} if channels is None else {"partial_rotary_factor": channels / hf_config["head_dim"]}
    return PARTIAL_ROPE.read({**rotated, **hf_config})


def _positions_json(config: ModelConfig) -> Settings:
    return PARTIAL_ROPE.write(config) | {"rotary_dim": round(config.head_size * config.rotary_percent)}


POSITIONS = KeyRule(_positions, _positions_json, {**PARTIAL_ROPE.types, "rotary_dim": WIDTH})
