"""Rules for settings of config.json that need more than a renamed key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError, quoted
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.positions.settings import PositionConfig
from megatron_core.foreign_json import (
    COUNT,
    COUNT_OR_ZERO,
    FACTORS,
    LENGTH,
    LENGTH_OR_ZERO,
    NUMBER,
    OBJECT,
    POSITIVE,
    STRING,
    STRINGS,
    SWITCH,
    KeyType,
    wrong_values,
)
from megatron_core.hub.settings import LARGEST_TOKEN_ID, is_token_id

Settings = dict[str, Any]
TOKEN_ID = KeyType(f"a token's id from -1 to {LARGEST_TOKEN_ID:,}, or a list of ids", is_token_id)


def refuse(key: str, value: object, reason: str) -> NoReturn:
    """Raise ``CheckpointError`` for the value of a key of config.json."""
    raise CheckpointError(f"config.json says {key}={quoted(value)}; {reason}")


def check_types(hf_config: Settings, types: Mapping[str, KeyType]) -> None:
    """``CheckpointError`` for the first key with a value that its type does not accept."""
    for key, value, key_type in wrong_values(hf_config, types):
        refuse(key, value, f"it must be {key_type.description}")


@dataclass(frozen=True)
class KeyRule:
    """Settings that are computed from several keys of config.json, or from values with other names."""

    read: Callable[[Settings], Settings]
    """config.json -> settings."""
    write: Callable[[Any], Settings]
    """The inverse: configuration -> keys of config.json."""
    types: Mapping[str, KeyType] = field(default_factory=dict)
    """Types of the keys that ``read`` uses."""


def rope_parameters(hf_config: Settings) -> Settings:
    """The parameters of rotary positions; ``rope_scaling`` of earlier releases overrides ``rope_parameters``."""
    key = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    rope = hf_config.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        refuse(key, rope, "one set of parameters for all layers is supported")
    return rope


def rope_type(rope: Settings) -> Any:
    """The kind of scaling in the parameters of rotary positions."""
    return rope.get("rope_type", rope.get("type", "default"))


LLAMA3: Settings = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Constants of Llama 3.1's scaling of rotary positions."""
LLAMA3_CONTEXT = 8192
"""Positions that Llama 3 was trained on: the default of ``original_max_position_embeddings``."""
YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "yarn_attention_factor",
}
"""Parameter of YaRN in config.json -> setting."""


LONGROPE_MSCALES = {"short_mscale": "longrope_short_mscale", "long_mscale": "longrope_long_mscale"}
"""Magnitude of LongRoPE in config.json -> setting."""


def _rope_settings(hf_config: Settings, *, partial: bool) -> Settings:
    rope = rope_parameters(hf_config)

    def first(keys: tuple[str, str], default: float) -> float:
        values = (config[key] for config in (rope, hf_config) for key in keys if config.get(key) is not None)
        return float(next(values, default))

    percent = first(("partial_rotary_factor", "rotary_pct"), 1.0)
    if percent != 1.0 and not partial:
        refuse("partial_rotary_factor", percent, f"for {hf_config.get('model_type')} only 1.0 is supported")
    base = first(("rope_theta", "rotary_emb_base"), 10000.0)
    return {"rotary_base": base, "rotary_percent": percent, **_rope_scaling_settings(rope, hf_config)}


def _rope_scaling_settings(rope: Settings, hf_config: Settings) -> Settings:
    scaling = rope_type(rope)
    if scaling == "default":
        return {}
    longest = int(hf_config.get("max_position_embeddings", 2048))
    key = "original_max_position_embeddings"
    original = hf_config.get(key) or rope.get(key, longest)
    scalars = {key: value for key, value in rope.items() if not isinstance(value, list)}
    if rope.get("factor") is None and scaling in ("linear", "dynamic", "llama3"):
        refuse("rope_type", scaling, f"it needs a factor, and there is {scalars}")
    if scaling == "linear":
        return {"rotary_seq_len_interpolation_factor": float(rope["factor"])}
    scaled: Settings = {"use_rope_scaling": True, "rope_scaling_type": scaling}
    if scaling == "llama3" and all(rope.get(name) == value for name, value in LLAMA3.items()):
        factors = None if original == LLAMA3_CONTEXT else original
        return scaled | {"rope_scaling_factor": float(rope["factor"]), "original_max_position_embeddings": factors}
    if scaling == "dynamic":
        return scaled | {"rope_scaling_factor": float(rope["factor"]), "original_max_position_embeddings": longest}
    if scaling == "yarn":
        named = {setting: rope[key] for key, setting in YARN.items() if rope.get(key) is not None}
        if not (rope.get("mscale") and rope.get("mscale_all_dim")):  # transformers reads both or none
            named = {setting: value for setting, value in named.items() if not setting.startswith("mscale")}
        factor = float(rope.get("factor") or longest / original)
        return scaled | named | {"rope_scaling_factor": factor, "original_max_position_embeddings": original}
    if scaling == "longrope":
        factor = float(rope.get("factor") or longest / original)
        factors = {"rope_scaling_factor": factor, "original_max_position_embeddings": original}
        return scaled | factors | _longrope_settings(rope)
    raise CheckpointError(
        f"config.json says rope_type={quoted(scaling)} with {quoted(scalars)}; supported are default, linear, dynamic, "
        f"yarn, longrope, and llama3 with {LLAMA3}"
    )


def _longrope_settings(rope: Settings) -> Settings:
    """``transformers`` reads magnitudes of short and long texts for phimoe alone; see there."""
    for key in ("short_factor", "long_factor"):
        if rope.get(key) is None:
            refuse("rope_type", "longrope", f"it needs a {key}")
    for key in ("short_mscale", "long_mscale"):
        if rope.get(key) is not None:
            refuse(key, rope[key], "with longrope it is supported for phimoe only")
    factors = {f"longrope_{key}": tuple(map(float, rope[key])) for key in ("short_factor", "long_factor")}
    return factors | dict.fromkeys(LONGROPE_MSCALES.values(), rope.get("attention_factor"))


def _longrope_json(config: PositionConfig) -> Settings:
    """In the form of published models, which early releases require: no key that the others determine."""
    original = config.original_max_position_embeddings
    factor = config.rope_scaling_factor
    factors = {"short_factor": config.longrope_short_factor, "long_factor": config.longrope_long_factor}
    scaling: Settings = {"type": "longrope", **{key: list(values) for key, values in factors.items()}}
    if original is None or factor != (config.max_position_embeddings or 0) / original:
        scaling["factor"] = factor
    if config.longrope_short_mscale != config.longrope_long_mscale:
        scaling |= {key: getattr(config, name) for key, name in LONGROPE_MSCALES.items()}
    elif config.longrope_short_mscale is not None:
        scaling["attention_factor"] = config.longrope_short_mscale
    return scaling


def _rope_json(config: ModelConfig) -> Settings:
    """Written as ``rope_theta`` and ``rope_scaling``, which every release of transformers reads."""
    settings = config.section(PositionConfig)
    keys: Settings = {"rope_theta": config.rotary_base, "rope_scaling": _rope_scaling_json(settings)}
    if settings.is_scaled_by("longrope"):
        keys["original_max_position_embeddings"] = settings.original_max_position_embeddings
    return keys


def _rope_parameters_json(config: ModelConfig) -> Settings:
    """In one object, for architectures that have default scalings: there the keys of earlier releases do not replace
    all of them."""
    keys = _rope_json(config)
    scaling = {"rope_type": "default", **(keys.pop("rope_scaling") or {}), "rope_theta": keys.pop("rope_theta")}
    return {**keys, "rope_parameters": scaling}


def _partial_rope_json(config: ModelConfig) -> Settings:
    """Also of 1.0, because several families have another default."""
    return _rope_json(config) | {"partial_rotary_factor": config.rotary_percent}


def _rope_scaling_json(config: PositionConfig) -> Settings | None:
    if not config.use_rope_scaling:
        linear = config.rotary_seq_len_interpolation_factor
        return None if linear is None else {"rope_type": "linear", "factor": linear}
    if config.is_scaled_by("longrope"):
        return _longrope_json(config)
    scaling: Settings = {"rope_type": config.rope_scaling_type, "factor": config.rope_scaling_factor}
    original = {"original_max_position_embeddings": config.original_max_position_embeddings}
    if config.rope_scaling_type == "llama3":
        return scaling | LLAMA3 | {key: value or LLAMA3_CONTEXT for key, value in original.items()}
    if config.rope_scaling_type == "yarn":
        named = {key: name for key, name in YARN.items() if config.mscale_all_dim or "mscale" not in key}
        parameters = {key: getattr(config, name) for key, name in named.items()}
        return scaling | original | {key: value for key, value in parameters.items() if value is not None}
    return scaling


_ROPE_NUMBERS = (
    *("rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct", "factor", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "short_mscale", "long_mscale"),
)
_ROPE_TYPES = {
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
    **dict.fromkeys(("rope_type", "type"), STRING),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), LENGTH),
    **dict.fromkeys(_ROPE_NUMBERS, POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER),
    **dict.fromkeys(("short_factor", "long_factor"), FACTORS),
    "truncate": SWITCH,
}
ROPE = KeyRule(lambda hf_config: _rope_settings(hf_config, partial=False), _rope_json, _ROPE_TYPES)
"""Rotary positions: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``."""
PARTIAL_ROPE = KeyRule(lambda hf_config: _rope_settings(hf_config, partial=True), _partial_rope_json, _ROPE_TYPES)
"""The same in a part of each head's channels: ``partial_rotary_factor``."""

ROPE_PARAMETERS = KeyRule(ROPE.read, _rope_parameters_json, _ROPE_TYPES)
"""``ROPE``, written as ``rope_parameters``."""


def _window_settings(hf_config: Settings) -> Settings:
    window = hf_config.get("sliding_window")
    kinds = hf_config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention"] * hf_config["num_hidden_layers"]
    if set(kinds) - {"sliding_attention", "full_attention"} or len(kinds) != hf_config["num_hidden_layers"]:
        refuse("layer_types", kinds, "supported are sliding_attention and full_attention, one for each layer")
    if window is not None and window < 1:
        refuse("sliding_window", window, "it has to be 1 or more, or null")
    layers = tuple(int(layer_type == "sliding_attention") for layer_type in kinds)
    if window is None or not any(layers):
        return {}
    # Their window counts the token itself, ours the tokens before it.
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": None if all(layers) else layers}


def _window_json(config: ModelConfig) -> Settings:
    if config.window_size is None:
        return {"sliding_window": None}
    windows = (config.window_of_layer(n) is not None for n in range(config.num_layers))
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"sliding_window": config.window_size[0] + 1, "layer_types": kinds}


WINDOWS = KeyRule(_window_settings, _window_json, {"sliding_window": LENGTH_OR_ZERO, "layer_types": STRINGS})
"""``sliding_window`` in the layers that ``layer_types`` names, by default in all."""
WINDOW_OF_ALL_LAYERS = KeyRule(
    read=lambda hf_config: _window_settings({**hf_config, "layer_types": None}),
    write=lambda config: {"sliding_window": _window_json(config)["sliding_window"]},
    types={"sliding_window": LENGTH_OR_ZERO},
)
"""``sliding_window`` in all layers, for architectures that do not read ``layer_types``."""


def windows_where(has_window: Callable[[Settings, int], bool], **types: KeyType) -> KeyRule:
    """``WINDOWS`` of the layers, by number from 0, for which ``has_window`` is true if there are no ``layer_types``.

    ``types``: types of the keys that ``has_window`` reads.
    """

    def read(hf_config: Settings) -> Settings:
        layers = range(hf_config["num_hidden_layers"])
        kinds = ["sliding_attention" if has_window(hf_config, layer) else "full_attention" for layer in layers]
        return _window_settings({"layer_types": kinds, **hf_config})

    return KeyRule(read, _window_json, {**WINDOWS.types, **types})


def _windows_with_positions(hf_config: Settings) -> Settings:
    """Without ``sliding_window`` all layers have positions."""
    if hf_config.get("sliding_window") is None:
        return {}
    every = hf_config.get("sliding_window_pattern", 4)
    if "layer_types" not in hf_config and (isinstance(every, str) or every == 0):
        refuse("sliding_window_pattern", every, "without layer_types it must be an integer >= 1")
    kinds = hf_config.get("layer_types") or [
        "sliding_attention" if n % every else "full_attention" for n in range(1, hf_config["num_hidden_layers"] + 1)
    ]
    without = tuple(int(layer_type == "full_attention") for layer_type in kinds)
    return {**WINDOWS.read({**hf_config, "layer_types": kinds}), "no_rope_freq": without if any(without) else None}


_PATTERN = KeyType("a string or an integer >= 0", lambda value: isinstance(value, str) or COUNT_OR_ZERO.accepts(value))
WINDOWS_WITH_POSITIONS = KeyRule(
    read=_windows_with_positions,
    write=lambda config: {"layer_types": ["full_attention"] * config.num_layers, **WINDOWS.write(config)},
    types={**WINDOWS.types, "sliding_window_pattern": _PATTERN},
)
"""``WINDOWS``, where layers without one, by default every n-th (``sliding_window_pattern``), have no positions."""

ATTENTION_BIASES = KeyRule(
    read=lambda hf_config: dict.fromkeys(
        ("add_qkv_bias", "add_attention_output_bias"), hf_config.get("attention_bias", False)
    ),
    write=lambda config: {"attention_bias": config.has_qkv_bias and config.has_attention_output_bias},
    types={"attention_bias": SWITCH},
)
"""``attention_bias``: biases of queries, keys, values and of attention's output, in a model without other biases."""


def norms_of_each_head(key: str) -> KeyRule:
    """``key``: whether queries and keys have norms with separate weights for each head."""
    settings = ("qk_layernorm", "qk_layernorm_weight_per_head")
    return KeyRule(
        read=lambda hf_config: dict.fromkeys(settings, hf_config.get(key, False)),
        write=lambda config: {key: config.qk_layernorm},
        types={key: SWITCH},
    )


GELU = {"gelu": False, "gelu_new": True, "gelu_fast": True, "gelu_pytorch_tanh": True}
"""Name of GELU -> whether it is the approximation by tanh; export writes the architecture's name, or the first one."""


def gelu(key: str, default: str) -> KeyRule:
    """The variant of GELU that ``key`` names."""

    def read(hf_config: Settings) -> Settings:
        name = hf_config.get(key, default)
        if name not in GELU:
            refuse(key, name, f"for {hf_config['model_type']} supported are {', '.join(GELU)}")
        return {"openai_gelu": GELU[name]}

    def write(config: ModelConfig) -> Settings:
        return {key: next(name for name in (default, *GELU) if GELU[name] == config.openai_gelu)}

    return KeyRule(read, write, {key: STRING})


MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys with the number of layers for multi-token prediction."""


def dense_first(
    *,
    dense: int,
    shared: int | None = None,
    dense_key: str = "first_k_dense_replace",
    shared_key: str = "n_shared_experts",
) -> KeyRule:
    """The first layers have dense MLPs, the others routed and shared experts.

    ``dense`` and ``shared`` are the numbers of dense layers and of shared experts if config.json has none.
    """

    def read(hf_config: Settings) -> Settings:
        count = hf_config.get(shared_key, shared)
        if not isinstance(count, int) or count < 1:
            refuse(shared_key, count, f"{hf_config.get('model_type')} models need 1 or more")
        layers = hf_config["num_hidden_layers"]
        first = min(hf_config.get(dense_key, dense), layers)
        return {
            "moe_layer_freq": (0,) * first + (1,) * (layers - first),
            "moe_shared_expert_intermediate_size": count * hf_config["moe_intermediate_size"],
        }

    def write(config: MoEConfig) -> Settings:
        sparse = config.expert_layers
        width = config.expert_ffn_size
        return {
            dense_key: sparse[0] if sparse else config.num_layers,
            shared_key: (config.moe_shared_expert_intermediate_size or 0) // width,
        }

    return KeyRule(read, write, dict.fromkeys((shared_key, dense_key, *MTP_LAYERS), COUNT_OR_ZERO))


def limited_to_groups(groups: int, chosen: int, counted: int) -> Settings:
    """Experts come from the ``chosen`` best groups; a group's score is the sum of its ``counted`` best scores."""
    if chosen >= groups:
        return {}
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_score_topk": counted,
    }


def groups_json(config: MoEConfig) -> Settings:
    """``n_group`` and ``topk_group``; 1 if the choice is not limited to groups."""
    if config.group_score_topk is None:
        return {"n_group": 1, "topk_group": 1}
    return {"n_group": config.moe_router_num_groups, "topk_group": config.moe_router_group_topk}


GROUP_TYPES = {"n_group": COUNT, "topk_group": COUNT}
GROUPS_BY_TWO = KeyRule(
    lambda hf_config: limited_to_groups(hf_config["n_group"], hf_config["topk_group"], 2), groups_json, GROUP_TYPES
)
"""DeepSeek-V3: the score of a group is the sum of its two best scores."""
