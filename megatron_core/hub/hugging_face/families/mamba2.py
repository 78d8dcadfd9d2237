"""Mamba-2: models whose layers are all Mamba-2 mixers."""

import math

from megatron_core.config import ModelConfig
from megatron_core.features.recurrent.kinds import Mamba2
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.foreign_json import COUNT, NUMBER, KeyType
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import RowRange

INFINITY = {"__float__": "Infinity"}
"""How transformers 5 writes infinity; earlier releases write Infinity, which all releases read."""
LIMITS = KeyType(
    "a list of two numbers >= 0, the second of which may be Infinity",
    lambda value: isinstance(value, list) and len(value) == 2 and NUMBER.accepts(value[0]) and _is_limit(value[1]),
)


def _is_limit(value: object) -> bool:
    return value in (INFINITY, math.inf) or NUMBER.accepts(value)


def _layers(hf_config: Settings) -> Settings:
    count = hf_config["num_hidden_layers"]
    width = hf_config["hidden_size"]
    inner = hf_config["num_heads"] * hf_config["head_dim"]
    expanded = hf_config["expand"] * width
    if inner != expanded:
        refuse("expand", hf_config["expand"], f"expand x hidden_size={width} must be num_heads x head_dim={inner}")
    return {"num_layers": count, "hybrid_layer_pattern": "M" * count}


def _layers_json(config: ModelConfig) -> Settings:
    sizes = Mamba2(config)
    expand = sizes.heads * sizes.value_head_size // config.hidden_size
    return {"num_hidden_layers": config.num_layers, "expand": expand, "num_heads": sizes.heads}


def limits(hf_config: Settings) -> Settings:
    """The bounds of steps in ``time_step_limit``."""
    least, most = hf_config["time_step_limit"]
    return {"mamba_dt_min": float(least), "mamba_dt_max": None if most in (INFINITY, math.inf) else float(most)}


def _limits_json(config: ModelConfig) -> Settings:
    config = config.section(RecurrentConfig)
    return {
        "time_step_limit": [
            config.mamba_dt_min,
            math.inf if config.mamba_dt_max is None else config.mamba_dt_max,
        ]
    }


LIMITS_OF_STEPS = KeyRule(limits, _limits_json, {"time_step_limit": LIMITS})
"""``time_step_limit``."""


def projected_rows(config: ModelConfig, _: int) -> list[RowRange]:
    """Stored are gates, inputs, B, C and steps; ours has the gates before the steps."""
    sizes = Mamba2(config)
    inner = sizes.pieces[0]
    mixed = sizes.pieces[0] + sizes.convolved
    return [RowRange(0, inner, mixed), RowRange(0, 0, inner), RowRange(0, mixed, mixed + sizes.heads)]


LAYERS = KeyRule(_layers, _layers_json, {"num_hidden_layers": COUNT, "expand": COUNT})
