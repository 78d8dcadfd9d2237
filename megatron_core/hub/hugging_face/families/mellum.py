"""Mellum 2: Qwen3-MoE with windows in some layers, which have positions of their own."""

from megatron_core.hub.hugging_face.families.gemma import ROPE_TYPES, rope_by_layer_type
from megatron_core.hub.hugging_face.families.olmo2 import by_layer_type_json
from megatron_core.hub.hugging_face.rules import KeyRule, windows_where

POSITIONS = KeyRule(rope_by_layer_type, by_layer_type_json, ROPE_TYPES)
WINDOWS = windows_where(lambda _, __: False)
"""Without ``layer_types`` no layer has a window."""
