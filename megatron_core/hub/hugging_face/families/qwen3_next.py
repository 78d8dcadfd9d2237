"""Qwen3-Next and Qwen3.5 (text): gated delta nets, and attention with a gate in every fourth layer."""

from megatron_core.config import ModelConfig
from megatron_core.features.recurrent.kinds import GatedDeltaNetKind
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.foreign_json import COUNT, STRINGS
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import RowRange

KINDS = ("full_attention", "linear_attention")
"""Values of ``layer_types``: attention, and the recurrence."""
EVERY = 4
"""Every n-th layer has attention, if config.json has neither ``layer_types`` nor ``full_attention_interval``."""


def _layers(hf_config: Settings) -> Settings:
    count = hf_config["num_hidden_layers"]
    every = hf_config.get("full_attention_interval", EVERY)
    kinds = hf_config.get("layer_types", [KINDS[(n + 1) % every != 0] for n in range(count)])
    if set(kinds) - set(KINDS) or len(kinds) != count or KINDS[1] not in kinds or count < 2:
        refuse("layer_types", kinds, f"supported are {' and '.join(KINDS)}, one of 2 or more layers with the latter")
    return {"linear_attention_freq": tuple(KINDS.index(layer_type) for layer_type in kinds)}


def _layers_json(config: ModelConfig) -> Settings:
    kinds = [KINDS[config.is_recurrent(n)] for n in range(config.num_layers)]
    return {"layer_types": kinds}


def gated_qkv_rows(config: ModelConfig, _: int) -> list[RowRange]:
    """Stored queries are followed by their gates, head by head; ours has queries, gates, key and value of a group."""
    d = config.head_size
    groups = config.query_groups
    heads = config.num_attention_heads // groups
    ranges = []
    for group in range(groups):
        group_heads = range(group * heads, (group + 1) * heads)
        ranges += [
            RowRange(0, (2 * head + half) * d, (2 * head + half + 1) * d) for half in (0, 1) for head in group_heads
        ]
        ranges += [RowRange(tensor, group * d, (group + 1) * d) for tensor in (1, 2)]
    return ranges


def rows_by_key_head(config: ModelConfig, _: int) -> list[RowRange]:
    """Qwen3-Next stores queries, keys, values and gates of each key head together, and rates and decays of each."""
    config = config.section(RecurrentConfig)
    groups = config.linear_num_key_heads
    values = config.linear_num_value_heads // groups
    key = config.linear_key_head_dim
    value = config.linear_value_head_dim * values
    ranges = []
    for tensor, sizes in enumerate(((key, key, value, value), (values, values))):
        for number, size in enumerate(sizes):
            firsts = (group * sum(sizes) + sum(sizes[:number]) for group in range(groups))
            ranges += [RowRange(tensor, first, first + size) for first in firsts]
    return ranges


def separate_rows(config: ModelConfig, _: int) -> list[RowRange]:
    """Qwen3.5 stores queries, keys and values in one matrix, and gates, rates and decays in one each."""
    sizes = GatedDeltaNetKind(config).pieces
    joined = (sum(sizes[:3]), *sizes[3:])
    return [RowRange(tensor, 0, size) for tensor, size in enumerate(joined)]


LAYER_TYPES = KeyRule(_layers, _layers_json, {"layer_types": STRINGS, "full_attention_interval": COUNT})
