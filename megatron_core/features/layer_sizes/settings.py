"""Sizes of attention and MLP that differ between layers, from the JSON of Megatron-LM and of Nemotron models."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from megatron_core.config.layer_settings import LayerBlock, LayerPart
from megatron_core.config.model import ModelConfig
from megatron_core.config.setting import ALWAYS, Resume, section, setting
from megatron_core.errors import ConfigError, quoted, shortened
from megatron_core.text_file import parse_json, read_text

MULTIPLE = 256
"""Widths from ``ffn_mult`` are multiples of this."""
MODEL_KEYS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "rope_theta": "rotary_base",
}
"""Further keys of the JSON, as in a config.json -> the settings that must agree with them."""
LAYERS_JSON, LAYERS_FILE = "heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path"
"""The setting, and the name of a file that contains it."""
KEPT = ("block_configs", *MODEL_KEYS, "hidden_act", "tie_word_embeddings")
"""The keys of the JSON that are read."""


def _other_sizes(run: Any, stored: Any) -> tuple[str, Sequence[object]] | None:
    """The layers whose sizes differ: the text may have other keys, or sizes that it leaves to the model."""
    pairs = zip_longest(run.model.sized_blocks, stored.model.sized_blocks)
    layers = [number for number, (size, stored_size) in enumerate(pairs) if size != stored_size]
    if layers and not (run.model.blocks and stored.model.blocks):
        return None
    # The JSON of a large model is too long to be compared by eye.
    return "other sizes than the checkpoint in block_configs", layers


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.TENSORS)
class HeterogeneousConfig(ModelConfig):
    """Layers whose sizes differ, from a search for the best architecture (Bercovich et al. 2024, arXiv 2411.19146)."""

    heterogeneous_layers_config_encoded_json: str | None = setting(
        None, when=ALWAYS, aliases="heterogeneous_layers_config_path", difference=_other_sizes
    )
    """Sizes of each layer, as JSON: {"block_configs": [{"attention": {"num_query_groups": 8}, "mlp":
    {"ffn_hidden_size": 14336}}, ...]}, one entry per layer. "no_op": true removes attention or the MLP,
    "replace_with_linear": true replaces it by one linear layer; without a size the layer has the model's. The keys of
    Nemotron's config.json, n_heads_in_group and ffn_mult, are also supported. --heterogeneous-layers-config-path FILE,
    also in a --config file, reads the JSON from a file."""

    @property
    def blocks(self) -> tuple[LayerBlock, ...]:
        """The layers of a model whose layers differ in their sizes, else ()."""
        text = self.heterogeneous_layers_config_encoded_json
        return () if text is None else read_blocks(text, self.hidden_size, self.num_attention_heads)[0]

    @property
    def sized_blocks(self) -> tuple[LayerBlock, ...]:
        """``blocks`` with all sizes, also those of the model."""
        return tuple(block.sized(self.query_groups, self.ffn_size) for block in self.blocks)

    @property
    def layers_differ_in_size(self) -> bool:
        """Whether some layers have sizes of their own."""
        return bool(self.blocks)

    def block_of(self, layer_number: int) -> LayerBlock:
        """The sizes of the parts of a layer (numbered from 0)."""
        blocks = self.blocks
        return blocks[layer_number] if layer_number < len(blocks) else super().block_of(layer_number)

    def feed_forward_name(self, layer_number: int) -> str | None:
        """The kind of the feed-forward part of a layer (numbered from 0), here "linear"."""
        return "linear" if self.block_of(layer_number).mlp.linear else super().feed_forward_name(layer_number)

    def of_layer(self, layer_number: int) -> ModelConfig:
        """The settings with the sizes of a layer (numbered from 0); ``self`` if all layers have the same."""
        block = self.block_of(layer_number)
        return self if block.has_sizes_of_model else _with_sizes(self, block)


@lru_cache(maxsize=1024)  # replace takes 0.3 ms, and a search over layouts asks for each layer often
def _with_sizes(model: ModelConfig, block: LayerBlock) -> ModelConfig:
    sizes: dict[str, Any] = {} if block.mlp.size is None else {"ffn_hidden_size": block.mlp.size}
    if block.attention.size is not None:
        sizes |= {"group_query_attention": True, "num_query_groups": block.attention.size}
    return replace(model, **sizes)


def compact_json(text: str) -> str:
    """The JSON of the setting without the keys that are not read. Errors: ``ValueError``."""
    loaded = parse_json(text)
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}; it must be an object with block_configs")
    return json.dumps({key: loaded[key] for key in KEPT if key in loaded}, separators=(",", ":"))


@lru_cache(maxsize=256)
def read_blocks(text: str, hidden_size: int, heads: int) -> tuple[tuple[LayerBlock, ...], tuple[str, ...]]:
    """The layers in the JSON of the setting, and a message for each of its faults; without layers if it has faults."""
    faults: list[str] = []
    blocks: list[LayerBlock] = []
    try:
        content = parse_json(text)
    except ValueError as error:
        return (), (f"is not valid JSON ({shortened(str(error))}); correct it",)
    entries = content.get("block_configs") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        return (), ("must be an object with block_configs, a list with an entry for each layer",)
    for number, entry in enumerate(entries):
        named, block = f"block_configs[{number}]", entry if isinstance(entry, dict) else {}
        ffn = "mlp" if block.get("ffn") is None else "ffn"
        others = {key: value for key, value in block.items() if key not in ("attention", ffn)}
        _Reader(named, others, faults).refuse_the_rest()  # and mlp if there is ffn
        attention = _Reader(f"{named}.attention", block.get("attention"), faults)
        mlp = _Reader(f"{named}.{ffn}", block.get(ffn), faults)
        groups, width = attention.integer("num_query_groups"), mlp.integer("ffn_hidden_size")
        of_group, factor = attention.integer("n_heads_in_group"), mlp.number("ffn_mult")
        if None not in (groups, of_group) or None not in (width, factor):
            faults.append(f"has two sizes of one part in {named}; keep one")
        if groups is None and of_group is not None:
            groups, remainder = divmod(heads, of_group)
            if remainder:
                faults.append(f"has {named}.attention.n_heads_in_group={of_group}, which must divide {heads} heads")
        if width is None and factor is not None:
            width = -(-int(2 * factor * hidden_size / 3) // MULTIPLE) * MULTIPLE
            if not 0 < width < 2**31:
                faults.append(f"has {named}.{ffn}.ffn_mult={factor}, a width of {width}; legal: 1 to 2**31 - 1")
        blocks.append(LayerBlock(attention.part(groups), mlp.part(width)))
    return (() if faults else tuple(blocks)), tuple(faults)


class _Reader:
    """Reads the entry of a part, and adds messages to ``faults``."""

    def __init__(self, name: str, entry: Any, faults: list[str]) -> None:
        self.name, self.faults, self.left = name, faults, dict(entry) if isinstance(entry, dict) else {}
        if not isinstance(entry, dict):
            faults.append(f"has no object {name}; write {{}} for the sizes of the model")

    def number(self, key: str) -> float | None:
        """A number > 0; None if it is null or left out."""
        value = self.left.pop(key, None)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31):
            return value
        self.faults.append(f"has {self.name}.{key}={quoted(value)}; it must be a number > 0, or null")
        return None

    def integer(self, key: str) -> int | None:
        """An integer >= 1; None if it is null or left out."""
        value = self.number(key)
        if value is None or value == int(value):
            return None if value is None else int(value)
        self.faults.append(f"has {self.name}.{key}={quoted(value)}; it must be an integer >= 1, or null")
        return None

    def part(self, size: int | None) -> LayerPart:
        """The part with this size."""
        switches = [self.left.pop(key, False) for key in ("no_op", "replace_with_linear")]
        if not all(isinstance(value, bool) for value in switches):
            self.faults.append(f"has values of {self.name}.no_op or .replace_with_linear that are not true or false")
        if all(switches) or (any(switches) and size is not None):
            self.faults.append(f"has {self.name} with several of no_op, replace_with_linear and a size; keep one")
        self.refuse_the_rest()
        return LayerPart(bool(switches[0]), bool(switches[1]), size)

    def refuse_the_rest(self) -> None:
        """Add a message for each key that was not read, unless it is null or false."""
        for key, value in self.left.items():
            if value is not None and value is not False:
                self.faults.append(f"has {self.name}.{key}={quoted(value)}, which is not supported; remove it")


def write_blocks(blocks: Sequence[LayerBlock]) -> str:
    """The inverse of ``read_blocks``."""

    def entry(part: LayerPart, key: str) -> dict[str, Any]:
        switches = {"no_op": part.no_op, "replace_with_linear": part.linear}
        return {name: True for name, on in switches.items() if on} | {key: part.size}  # Megatron Core needs the key

    entries = [
        {"attention": entry(block.attention, "num_query_groups"), "mlp": entry(block.mlp, "ffn_hidden_size")}
        for block in blocks
    ]
    return json.dumps({"block_configs": entries}, separators=(",", ":"))


def read_layers_file(path: str) -> str:
    """The JSON in a file, for the setting. Errors: ``ConfigError``."""
    try:
        return compact_json(read_text(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or shortened(str(error))
        raise ConfigError(f"{LAYERS_FILE}={path} cannot be read: {reason}; give a file with the JSON") from None
