"""Llama-Nemotron Super and Ultra, found by a search of architectures: Llama with layers of different sizes."""

import json
from typing import Any

from megatron_core.config import ModelConfig
from megatron_core.features.layer_sizes.settings import (
    LAYERS_JSON,
    MULTIPLE,
    HeterogeneousConfig,
    read_blocks,
    write_blocks,
)
from megatron_core.foreign_json import KeyType
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse

KEY = "block_configs"
OBJECTS = KeyType(
    "a list of objects", lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value)
)


def _blocks(hf_config: Settings) -> Settings:
    entries = hf_config[KEY]
    if len(entries) != hf_config["num_hidden_layers"]:
        refuse(KEY, entries, f"it must have an entry for each of num_hidden_layers={hf_config['num_hidden_layers']}")
    text = json.dumps({KEY: entries})
    blocks, faults = read_blocks(text, hf_config["hidden_size"], hf_config["num_attention_heads"])
    if faults:
        refuse(KEY, entries, "; ".join(faults))
    return {LAYERS_JSON: write_blocks(blocks)}


def _blocks_json(config: ModelConfig) -> Settings:
    entries: list[dict[str, Any]] = []
    for block in config.section(HeterogeneousConfig).sized_blocks:
        groups = block.attention.size
        width = block.mlp.size
        if width is not None and width % MULTIPLE:
            refuse(KEY, width, f"widths of MLPs are multiples of {MULTIPLE} in this architecture")
        entry: dict[str, dict[str, Any]] = {
            "attention": {"n_heads_in_group": None if groups is None else config.num_attention_heads // groups},
            "ffn": {"ffn_mult": None if width is None else 1.5 * width / config.hidden_size},
        }
        for name, sizes in (("attention", block.attention), ("ffn", block.mlp)):
            entry[name] |= {"no_op": sizes.no_op, "replace_with_linear": sizes.linear}
        entries.append(entry)
    return {KEY: entries, "num_key_value_heads": None, "intermediate_size": None}


BLOCKS = KeyRule(_blocks, _blocks_json, {KEY: OBJECTS})
