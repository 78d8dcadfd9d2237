"""What describes an architecture of the Hugging Face hub, and settings that many of them write alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from megatron_core.config import ModelConfig
from megatron_core.config.model import EXECUTION_SETTINGS, TRAINING_SETTINGS
from megatron_core.config.tables import read_table
from megatron_core.errors import CheckpointError
from megatron_core.models.hf.keys import check_keys
from megatron_core.models.hf.tensors import TensorSource

Settings = dict[str, Any]
_TABLE: dict[str, Settings] = read_table(__file__)["architectures"]


@dataclass(frozen=True)
class Architecture:
    """One architecture, in both directions."""

    model_type: str
    """``model_type`` in config.json."""
    class_name: str
    """``architectures`` in config.json."""
    keys: Mapping[str, str]
    """Their key in config.json -> our setting of the same meaning."""
    tensors: Mapping[str, TensorSource]
    """Our tensor's name, with ``{n}`` for the layer, -> theirs."""
    fixed: Settings = field(default_factory=dict)
    """Our settings that every model of the architecture has."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of other releases -> names in ``keys``."""
    assumed: Settings = field(default_factory=dict)
    """Their values of keys that config.json leaves out."""
    required: Settings = field(default_factory=dict)
    """Values that their keys must have, if present."""
    read: Callable[[Settings], Settings] = lambda theirs: {}
    """Further settings of ours from their configuration."""
    write: Callable[[ModelConfig], Settings] = lambda config: {}
    """The inverse of ``read``."""
    base: str = "model."
    """What the names of all tensors but the output layer's begin with; files of the bare model leave it out."""

    @classmethod
    def of(
        cls, model_type: str, tensors: Mapping[str, TensorSource], *, layers: Settings, **others: Any
    ) -> "Architecture":
        """The architecture with the names and values of ``architecture.yaml``; ``layers`` are fixed, too."""
        table = _TABLE[model_type]
        fixed = layers | table.get("fixed", {})
        return cls(**table | {"model_type": model_type, "tensors": tensors, "fixed": fixed, **others})

    def settings(self, theirs: Settings) -> Settings:
        """Our model settings of a config.json; ``CheckpointError`` for what has no counterpart."""
        check_keys(theirs)
        present = self.assumed | {self.aliases.get(key, key): value for key, value in theirs.items()}
        theirs = {key: value for key, value in present.items() if value is not None}
        self._check(theirs, present)
        named = {ours: theirs[key] for key, ours in self.keys.items() if key in theirs}
        heads, groups = named["num_attention_heads"], named.pop("num_query_groups", None)
        if groups is not None and groups != heads:
            named |= {"group_query_attention": True, "num_query_groups": groups}
        if named.get("kv_channels") == named["hidden_size"] // heads:
            named["kv_channels"] = None
        untied = not theirs.get("tie_word_embeddings", False)
        try:
            return {**self.fixed, **named, "untie_embeddings_and_output_weights": untied, **self.read(theirs)}
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]}; {self.model_type} models need it") from None

    def _check(self, theirs: Settings, present: Settings) -> None:
        """``CheckpointError`` for keys without which, or with whose values, other logits would be computed."""
        if theirs.get("quantization_config"):
            fault("quantization_config", theirs["quantization_config"], "quantized weights are not read")
        for key, value in ({"is_causal": True} | self.required).items():
            found = present.get(key, value)
            if found != value and (found or value):  # null for what is off
                fault(key, found, f"for {self.model_type} only {value!r} is supported")
        missing = [key for key, ours in self.keys.items() if key not in theirs and ours not in OPTIONAL]
        if missing:
            raise CheckpointError(f"config.json has no {', '.join(missing)}; {self.model_type} models need it")

    def config_json(self, config: ModelConfig) -> Settings:
        """Their configuration of a model of ours, without what a ``ModelConfig`` does not say."""
        ours = vars(config) | {
            "num_query_groups": config.query_groups,
            "kv_channels": config.head_size,
            "ffn_hidden_size": config.ffn_size,
            "moe_ffn_hidden_size": config.expert_ffn_size,
        }
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "tie_word_embeddings": config.share_embeddings_and_output_weights,
            **self.required,
            **{key: ours[name] for key, name in self.keys.items()},
            **self.write(config),
        }

    def source(self, name: str) -> TensorSource:
        """Where our tensor ``name`` is."""
        parts = name.split(".")
        number = parts[2] if name.startswith("decoder.layers.") else ""
        pattern = ".".join([*parts[:2], "{n}", *parts[3:]]) if number else name
        if pattern not in self.tensors:
            raise CheckpointError(f"{self.model_type} models have no tensor for {name}")
        return self.tensors[pattern].for_layer(number)


def fault(key: str, value: object, remedy: str) -> NoReturn:
    """Refuse the value of a key of config.json."""
    raise CheckpointError(f"config.json says {key}={value!r}; {remedy}")


OPTIONAL = {
    *("num_query_groups", "kv_channels", "ffn_hidden_size", "q_lora_rank"),
    *("attn_logit_softcapping", "final_logit_softcapping", "moe_aux_loss_coeff"),
    *("max_position_embeddings", "init_method_std", "hidden_dropout", "attention_dropout"),
}
"""Our settings whose keys config.json may leave out: shapes tell them, or logits do not depend on them."""


GELU = {"gelu": False, "gelu_new": True, "gelu_fast": True, "gelu_pytorch_tanh": True}
"""Their names of GELU -> whether it is the approximation by tanh; exported under the first one of each."""


def gelu_settings(theirs: Settings, key: str, default: str) -> Settings:
    """Which GELU the MLP has."""
    name = theirs.get(key, default)
    if name not in GELU:
        fault(key, name, f"for {theirs['model_type']} supported are {', '.join(GELU)}")
    return {"openai_gelu": GELU[name]}


def gelu_json(config: ModelConfig, key: str) -> Settings:
    """The inverse of ``gelu_settings``."""
    return {key: next(name for name, approximate in GELU.items() if approximate == config.openai_gelu)}


def rope_settings(theirs: Settings, *, partial: bool = False) -> Settings:
    """Rotary positions; ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    ``partial``: whether the architecture can turn a part of a head's channels.
    """
    rope = rope_of(theirs)
    percent = _number((rope, theirs), ("partial_rotary_factor", "rotary_pct"), 1.0)
    if percent != 1.0 and not partial:
        fault("partial_rotary_factor", percent, f"for {theirs.get('model_type')} only 1.0 is supported")
    theta = _number((rope, theirs), ("rope_theta", "rotary_emb_base"), 10000.0)
    return {"rotary_base": theta, "rotary_percent": percent, **_rope_scaling(rope, theirs)}


def rope_of(theirs: Settings) -> Settings:
    """The parameters of rotary positions; an earlier release's ``rope_scaling`` goes before ``rope_parameters``."""
    key = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        fault(key, rope, "one set of parameters for all layers is supported")
    return rope


def _rope_scaling(rope: Settings, theirs: Settings) -> Settings:
    kind = rope.get("rope_type", rope.get("type", "default"))
    longest = int(theirs.get("max_position_embeddings", 2048))
    original = theirs.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings", longest)
    if kind == "default":
        return {}
    scalars = {key: value for key, value in rope.items() if not isinstance(value, list)}
    if rope.get("factor") is None and kind in ("linear", "dynamic", "llama3"):
        fault("rope_type", kind, f"it needs a factor, and there is {scalars}")
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": float(rope["factor"])}
    scaled: Settings = {"use_rope_scaling": True, "rope_scaling_type": kind}
    if kind == "llama3" and all(rope.get(name) == value for name, value in LLAMA3.items()):
        own = None if original == LLAMA3_CONTEXT else original
        return scaled | {"rope_scaling_factor": float(rope["factor"]), "original_max_position_embeddings": own}
    if kind == "dynamic":
        return scaled | {"rope_scaling_factor": float(rope["factor"]), "original_max_position_embeddings": longest}
    if kind == "yarn":
        named = {ours: rope[key] for key, ours in YARN.items() if rope.get(key) is not None}
        if not (rope.get("mscale") and rope.get("mscale_all_dim")):  # transformers reads both or none
            named = {ours: value for ours, value in named.items() if not ours.startswith("mscale")}
        factor = float(rope.get("factor") or longest / original)
        return scaled | named | {"rope_scaling_factor": factor, "original_max_position_embeddings": original}
    raise CheckpointError(
        f"config.json says rope_type={kind!r} with {scalars}; supported are default, linear, dynamic, yarn, and llama3 "
        f"with {LLAMA3}"
    )


LLAMA3: Settings = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The constants of Llama 3.1's scaling of rotary positions."""
LLAMA3_CONTEXT = 8192
"""The positions that Llama 3 was trained on, which are the default."""
YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "yarn_attention_factor",
}
"""Their parameter of YaRN -> our setting."""


def _number(configs: Sequence[Settings], keys: Sequence[str], default: float) -> float:
    """The first of ``keys`` that is set."""
    found = (config[key] for config in configs for key in keys if config.get(key) is not None)
    return float(next(found, default))


def rope_json(config: ModelConfig) -> Settings:
    """The inverse, in the words that every release of transformers reads."""
    part = {} if config.rotary_percent == 1.0 else {"partial_rotary_factor": config.rotary_percent}
    return {"rope_theta": config.rotary_base, "rope_scaling": _rope_scaling_json(config), **part}


def _rope_scaling_json(config: ModelConfig) -> Settings | None:
    if not config.use_rope_scaling:
        linear = config.rotary_seq_len_interpolation_factor
        return None if linear is None else {"rope_type": "linear", "factor": linear}
    scaling: Settings = {"rope_type": config.rope_scaling_type, "factor": config.rope_scaling_factor}
    original = {"original_max_position_embeddings": config.original_max_position_embeddings}
    if config.rope_scaling_type == "llama3":
        return scaling | LLAMA3 | {key: value or LLAMA3_CONTEXT for key, value in original.items()}
    if config.rope_scaling_type == "yarn":
        own = {key: getattr(config, ours) for key, ours in YARN.items() if config.mscale_all_dim or "mscale" not in key}
        return scaling | original | {key: value for key, value in own.items() if value is not None}
    return scaling


def window_settings(theirs: Settings) -> Settings:
    """``sliding_window`` counts a token's own key, ``window_size`` those before it; ``layer_types`` names the layers
    that have it, which are all of them by default."""
    window, kinds = theirs.get("sliding_window"), theirs.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention"] * theirs["num_hidden_layers"]
    if set(kinds) - {"sliding_attention", "full_attention"} or len(kinds) != theirs["num_hidden_layers"]:
        fault("layer_types", kinds, "supported are sliding_attention and full_attention, one for each layer")
    if window is not None and window < 1:
        fault("sliding_window", window, "it has to be 1 or more, or null")
    layers = tuple(int(kind == "sliding_attention") for kind in kinds)
    if window is None or not any(layers):
        return {}
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": None if all(layers) else layers}


def window_json(config: ModelConfig) -> Settings:
    """The inverse of ``window_settings``."""
    if config.window_size is None:
        return {"sliding_window": None}
    return {"sliding_window": config.window_size[0] + 1} | _layer_types(config)


def _layer_types(config: ModelConfig) -> Settings:
    windows = [config.window_of_layer(n) is not None for n in range(config.num_layers)]
    return {"layer_types": ["sliding_attention" if window else "full_attention" for window in windows]}


def differences(architecture: Architecture, config: ModelConfig) -> dict[str, Any] | None:
    """The settings that do not survive the way into a config.json and back, with the values that come back.

    None for a model without what every config.json of the architecture has.
    """
    try:
        again = ModelConfig(**architecture.settings(architecture.config_json(config)))
    except (CheckpointError, KeyError):
        return None
    own = _function(config)
    return {name: value for name, value in _function(again).items() if value != own[name]}


def _function(config: ModelConfig) -> Settings:
    """The settings that decide what the model computes, after defaults."""
    ignored = {*EXECUTION_SETTINGS, *TRAINING_SETTINGS, "max_position_embeddings", "make_vocab_size_divisible_by"}
    own = {f.name: getattr(config, f.name) for f in fields(ModelConfig) if f.name not in ignored}
    return own | {
        "group_query_attention": None,
        "num_query_groups": config.query_groups,
        "kv_channels": config.head_size,
        "ffn_hidden_size": config.ffn_size,
        "add_qkv_bias": config.has_qkv_bias,
        "window_size": [config.window_of_layer(n) for n in range(config.num_layers)],
        "window_attn_skip_freq": None,
        "moe_layer_freq": [config.has_experts(n) for n in range(config.num_layers)],
        "moe_ffn_hidden_size": config.expert_ffn_size,
    }
