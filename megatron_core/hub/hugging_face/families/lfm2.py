"""LFM2: layers of a gated short convolution or attention, and an MLP or experts, which are two layers each here."""

from megatron_core.config import ModelConfig
from megatron_core.features.recurrent.settings import CONVOLUTION, RecurrentConfig
from megatron_core.foreign_json import COUNT, COUNT_OR_ZERO, COUNTS, POSITIVE, STRINGS, SWITCH, WIDTH
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse

KINDS = {"conv": CONVOLUTION, "full_attention": "*"}
"""Values of ``layer_types`` -> letters of the pattern."""


def _layers(hf_config: Settings) -> Settings:
    count: int = hf_config["num_hidden_layers"]
    kinds = hf_config.get("layer_types")
    if kinds is None:
        attention = hf_config.get("full_attn_idxs", list(range(count)))
        kinds = ["full_attention" if n in attention else "conv" for n in range(count)]
    if len(kinds) != count or set(kinds) - set(KINDS):
        refuse("layer_types", kinds, f"it must have one of {', '.join(KINDS)} for each of {count} layers")
    dense = hf_config.get("num_dense_layers", count)
    pattern = "".join(KINDS[layer_type] + ("-" if n < dense else "E") for n, layer_type in enumerate(kinds))
    settings = {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}
    return settings | ({"linear_conv_kernel_dim": hf_config["conv_L_cache"]} if CONVOLUTION in pattern else {})


def _layers_json(config: ModelConfig) -> Settings:
    config = config.section(RecurrentConfig)
    mixers = (config.hybrid_layer_pattern or "")[::2]
    return {
        "num_hidden_layers": config.num_layers // 2,
        "layer_types": ["full_attention" if letter == "*" else "conv" for letter in mixers],
        "conv_L_cache": config.linear_conv_kernel_dim,
        "tie_embedding": config.share_embeddings_and_output_weights,  # of earlier releases
    }


LAYERS = KeyRule(
    _layers,
    _layers_json,
    {
        **dict.fromkeys(("num_hidden_layers", "conv_L_cache"), COUNT),
        "layer_types": STRINGS,
        "full_attn_idxs": COUNTS,
    },
)


def _widths(hf_config: Settings) -> Settings:
    """``block_auto_adjust_ff_dim``: two thirds of the width times a factor, rounded up to a multiple."""
    width = hf_config.get("block_ff_dim") or hf_config["intermediate_size"]
    factor = hf_config.get("block_ffn_dim_multiplier")
    unit = hf_config["block_multiple_of"]
    if hf_config["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if factor is not None:
            width = -(-int(factor * width) // unit) * unit
    return {"ffn_hidden_size": width}


def _widths_json(config: ModelConfig) -> Settings:
    sizes = dict.fromkeys(("intermediate_size", "block_ff_dim"), config.ffn_size)
    return {**sizes, "block_auto_adjust_ff_dim": False}


WIDTHS = KeyRule(
    _widths,
    _widths_json,
    {
        **dict.fromkeys(("intermediate_size", "block_ff_dim", "block_multiple_of"), WIDTH),
        **{"block_ffn_dim_multiplier": POSITIVE, "block_auto_adjust_ff_dim": SWITCH},
    },
)


def _experts_json(config: ModelConfig) -> Settings:
    mlps = (config.section(RecurrentConfig).hybrid_layer_pattern or "")[1::2]
    return {"num_dense_layers": mlps.index("E") if "E" in mlps else len(mlps)}


EXPERTS = KeyRule(lambda _: {}, _experts_json, {"num_dense_layers": COUNT_OR_ZERO})
