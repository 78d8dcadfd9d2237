"""Kimi Linear: Kimi delta attention, latent attention without rotary positions, and experts as DeepSeek-V3's."""

from typing import Any

from megatron_core.config import ModelConfig
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.recurrent.kinds import KimiDelta
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.foreign_json import COUNT, COUNT_OR_ZERO, COUNTS, OBJECT, STRINGS, WIDTH
from megatron_core.hub.hugging_face.families.deepseek import DENSE, EXPERT_LAYERS, SPARSE
from megatron_core.hub.hugging_face.families.qwen3_next import KINDS
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, groups_json, limited_to_groups, refuse
from megatron_core.hub.hugging_face.tensors import RowRange


def _mixers(hf_config: Settings) -> Settings:
    """Kinds of the layers, and the sizes of heads, which files of the hub have in ``linear_attn_config``."""
    nested: dict[str, Any] = hf_config.get("linear_attn_config", {})
    count = hf_config["num_hidden_layers"]
    kinds = [KINDS[n == 0 or n % 4 != 0] for n in range(count)]
    if "kda_layers" in nested and "full_attn_layers" in nested:  # these count from 1
        if sorted([*nested["kda_layers"], *nested["full_attn_layers"]]) != list(range(1, count + 1)):
            refuse("linear_attn_config", nested, f"kda_layers and full_attn_layers must be the layers 1 to {count}")
        kinds = [KINDS[n + 1 in nested["kda_layers"]] for n in range(count)]
    kinds = hf_config.get("layer_types", kinds)
    if set(kinds) - set(KINDS) or len(kinds) != count or KINDS[1] not in kinds or count < 2:
        refuse("layer_types", kinds, f"supported are {' and '.join(KINDS)}, one of 2 or more layers with the latter")
    heads = nested.get("num_heads", hf_config.get("linear_num_heads", 32))
    size = nested.get("head_dim", hf_config.get("linear_head_dim", 128))
    return {
        "linear_attention_freq": tuple(KINDS.index(layer_type) for layer_type in kinds),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": nested.get("short_conv_kernel_size", hf_config.get("linear_conv_kernel_dim", 4)),
    }


def _mixers_json(config: ModelConfig) -> Settings:
    config = config.section(RecurrentConfig)
    return {
        "layer_types": [KINDS[config.is_recurrent(n)] for n in range(config.num_layers)],
        "linear_num_heads": config.linear_num_value_heads,
        "linear_head_dim": config.linear_value_head_dim,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
    }


def _heads(hf_config: Settings) -> Settings:
    """Latent attention has as many key heads as query heads, by default 32; ``head_dim`` has no meaning."""
    heads = hf_config["num_attention_heads"]
    key_heads = hf_config.get("num_key_value_heads", 32)
    if key_heads != heads:
        refuse("num_key_value_heads", key_heads, f"supported is num_attention_heads={heads}")
    return {}


def _experts(hf_config: Settings) -> Settings:
    """Layers with experts, the width of shared ones, and groups."""
    layers = hf_config["num_hidden_layers"]
    first = hf_config.get("first_k_dense_replace", 1)
    kinds = [SPARSE if n >= first else DENSE for n in range(layers)]
    return {
        **EXPERT_LAYERS.read({"mlp_layer_types": kinds, **hf_config}),
        "moe_shared_expert_intermediate_size": hf_config["num_shared_experts"] * hf_config["moe_intermediate_size"],
        **limited_to_groups(hf_config["num_expert_group"], hf_config["topk_group"], 2),
    }


def _experts_json(config: MoEConfig) -> Settings:
    groups = groups_json(config)
    return {
        **EXPERT_LAYERS.write(config),
        "num_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.expert_ffn_size,
        "num_expert_group": groups["n_group"],
        "topk_group": groups["topk_group"],
    }


def pieces(*numbers: int) -> Any:
    """Row ranges of stored tensors that hold the given pieces, one each."""

    def rows(config: ModelConfig, _: int) -> list[RowRange]:
        sizes = KimiDelta(config).pieces
        return [RowRange(tensor, 0, sizes[number]) for tensor, number in enumerate(numbers)]

    return rows


MIXER_TYPES = {
    "layer_types": STRINGS,
    "linear_attn_config": OBJECT,
    **dict.fromkeys(("kda_layers", "full_attn_layers"), COUNTS),
    **dict.fromkeys(("linear_num_heads", "linear_head_dim", "num_heads"), WIDTH),
    **dict.fromkeys(("linear_conv_kernel_dim", "short_conv_kernel_size"), COUNT),
}
EXPERT_TYPES = {
    "mlp_layer_types": STRINGS,
    "first_k_dense_replace": COUNT_OR_ZERO,
    **dict.fromkeys(("num_shared_experts", "num_expert_group", "topk_group"), COUNT),
}
MIXERS = KeyRule(_mixers, _mixers_json, MIXER_TYPES)
HEADS = KeyRule(
    _heads, lambda config: {"num_key_value_heads": config.num_attention_heads}, {"num_key_value_heads": COUNT}
)
EXPERTS = KeyRule(_experts, _experts_json, EXPERT_TYPES)
