"""Architectures of the Hugging Face hub: their declaration, their registry, and the choice of one for export."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, get_args

from megatron_core.config import ModelConfig
from megatron_core.config.run import field_types
from megatron_core.config.setting import Resume, names_by_resume
from megatron_core.errors import CheckpointError, quoted
from megatron_core.feature import extended
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.features.layer_sizes.settings import LAYERS_JSON, HeterogeneousConfig
from megatron_core.features.mup.settings import MuPConfig
from megatron_core.features.recurrent.kinds import Mamba2
from megatron_core.features.value_head.settings import ValueHeadConfig
from megatron_core.foreign_json import (
    COUNT,
    COUNT_OR_ZERO,
    LENGTH,
    NUMBER,
    OBJECT,
    POSITIVE,
    STRING,
    SWITCH,
    WIDTH,
    KeyType,
)
from megatron_core.hub.hugging_face.classifier import TENSORS as CLASSIFIER_TENSORS
from megatron_core.hub.hugging_face.classifier import classifier_keys, is_value_model
from megatron_core.hub.hugging_face.rules import TOKEN_ID, KeyRule, Settings, check_types, refuse
from megatron_core.hub.hugging_face.tensors import TensorSource
from megatron_core.hub.settings import TOKEN_ID_KEYS
from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
OPTIONAL = {*_TABLES["optional"]}
"""Settings whose keys config.json may leave out: shapes determine them, or logits do not depend on them."""
TYPES_OF_SETTINGS: dict[str, KeyType] = {
    **dict.fromkeys(_TABLES["counts"], COUNT),
    **dict.fromkeys(_TABLES["numbers"], NUMBER),
    "max_position_embeddings": LENGTH,
}
"""Types of keys with the meaning of these settings; others follow from the type of the setting."""
_TYPES = {bool: SWITCH, int: WIDTH, float: POSITIVE, str: STRING}
IGNORED_KEYS = {*_TABLES["ignored_keys"], *TOKEN_ID_KEYS}
"""Keys that do not change the logits of a model, or repeat other keys."""
ROPE_KEY = "rope_parameters"
_COMMON_TYPES = {"model_type": STRING, "vocab_size": LENGTH, "tie_word_embeddings": SWITCH, "is_causal": SWITCH}
_COMMON_TYPES |= dict.fromkeys(TOKEN_ID_KEYS, TOKEN_ID)
_COMMON_TYPES |= {"quantization_config": OBJECT, "quant_method": STRING}


FP8 = "fp8"
"""Value of ``quant_method`` for weights in FP8 with a scale for each block, which any architecture may have."""


def no_notes(_: Settings, __: ModelConfig) -> Iterator[str]:
    """Nothing to say about a config.json: it has one meaning."""
    return iter(())


ACTIVATIONS = (
    *("swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "xielu", "openai_gelu"),
    *("glu_linear_offset", "activation_func_clamp_value"),
)
"""Settings of the function between the matrices of an MLP or an expert."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One ``model_type`` of the hub: names and meaning of its settings and tensors, for import and export."""

    model_type: str
    """``model_type`` in config.json."""
    class_name: str
    """``architectures`` in config.json."""
    exported_as: str | None = None
    """``model_type`` of the architecture that export writes instead: `transformers` has no text model of this one."""
    keys: Mapping[str, str]
    """Key of config.json -> setting of ``ModelConfig`` with the same meaning."""
    tensors: Mapping[str, str | TensorSource]
    """Module outside of the layers -> stored module; a key may also be the name of one parameter."""
    layer_tensors: Mapping[str, str | TensorSource]
    """The same inside a layer."""
    layer_prefix: str
    """Prefix of the stored names of layer ``{n}``."""
    parts_of_layer: int = 1
    """Number of our layers that a stored layer consists of."""
    layer_constants: Mapping[str, float] = field(default_factory=dict)
    """Stored scalars of each layer that all models share."""
    base: str = "model."
    """Prefix of all stored names but the output layer's; files of the model without output layer omit it."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all models of the architecture share."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that config.json may leave out."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """The only supported values of keys; they are written on export."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of keys in other releases -> names in ``keys``."""
    rules: tuple[KeyRule, ...] = ()
    """Settings that need more than a renamed key."""
    derived: str = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    """Regular expression of stored names, without ``base``, that are computed from the configuration and ignored."""
    mtp_layer_keys: tuple[str, ...] = ()
    """Keys with the number of layers for multi-token prediction, which follow the others and are left out."""
    mtp_names: str | None = None
    """Regular expression of stored names, without ``base``, of such layers if they have names of their own."""
    unread: frozenset[str] = frozenset()
    """Further keys of published files that describe what ``fixed``, ``required`` or other keys say."""
    notes: Callable[[Settings, ModelConfig], Iterator[str]] = no_notes
    """Notes for the user about a config.json whose model runs with these settings."""
    not_null: tuple[str, ...] = ()
    """Keys of tokens that `transformers` does not accept as null: without such a token export leaves them out."""
    quantized: tuple[str, ...] = ()
    """Values of ``quant_method`` in ``quantization_config`` whose weights can be read, besides fp8 with blocks."""

    def settings(self, hf_config: Mapping[str, Any]) -> Settings:
        """The model settings of a config.json. Errors: ``CheckpointError`` naming an unsupported or missing key."""
        check_types(dict(hf_config), self._types())
        renamed = {self.aliases.get(key, key): value for key, value in hf_config.items()}
        if renamed.get(ROPE_KEY, {}) is None:
            del renamed[ROPE_KEY]  # transformers: the default, where other keys are None
        present = {**self.defaults, **renamed}
        stated = {key: value for key, value in present.items() if value is not None}
        self._check_values(stated, present)
        settings = {name: stated[key] for key, name in self.keys.items() if key in stated}
        # Defaults that depend on other settings are left to our configuration.
        heads = settings.get("num_attention_heads")
        groups = settings.pop("num_query_groups", None)
        if groups is not None and groups != heads:
            settings |= {"group_query_attention": True, "num_query_groups": groups}
        if heads is not None and settings.get("kv_channels") == settings["hidden_size"] // heads:
            settings["kv_channels"] = None
        settings["untie_embeddings_and_output_weights"] = not stated.get("tie_word_embeddings", False)
        settings["value_head"] = is_value_model(hf_config)
        try:
            for rule in self.rules:
                settings |= rule.read(stated)
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error.args[0]}; {self.model_type} models need it") from None
        settings = {**self.fixed, **settings}
        if settings.get("latent_norm_epsilon") == settings.get("norm_epsilon"):
            settings.pop("latent_norm_epsilon", None)
        pattern = settings.get("hybrid_layer_pattern") or "E"
        if not any(settings.get("moe_layer_freq", (1,))) or "E" not in pattern:
            # An architecture with experts, in a model whose layers all have dense MLPs.
            settings = {name: value for name, value in settings.items() if not name.startswith(("moe_", "num_experts"))}
        self._check_together(settings)
        return settings

    def _check_together(self, settings: Settings) -> None:
        """``CheckpointError`` for settings that are supported one by one, but together would give other logits."""
        k = settings.get("moe_router_topk")
        is_divided = not settings.get("moe_apply_probs_on_input")
        if k == 1 and is_divided and settings.get("moe_router_score_function") == "sigmoid":
            key = next((key for key, name in self.keys.items() if name == "moe_router_topk"), "num_experts_per_tok")
            refuse(key, k, f"{self.model_type} models need 2 or more: they divide the score of one expert by itself")
        scaling = settings.get("rope_scaling_type")
        if settings.get("qk_l2_norm") and scaling in ("yarn", "longrope"):
            reason = "norms of queries and keys after the rotary positions, which undo the factor of this scaling"
            refuse("rope_type", scaling, f"{self.model_type} models have {reason}")

    def _types(self) -> dict[str, KeyType]:
        types = {**_COMMON_TYPES, **{key: _type_of(name) for key, name in self.keys.items()}}
        types |= {key: _TYPES[type(value)] for key, value in self.required.items() if type(value) in (bool, str)}
        types |= dict.fromkeys(self.mtp_layer_keys, COUNT_OR_ZERO)
        for rule in self.rules:
            types |= rule.types
        return types | {alias: types[key] for alias, key in self.aliases.items()}

    def known_keys(self) -> set[str]:
        """The keys of config.json that have a meaning for the architecture, or none for any model."""
        declared = {*self.defaults, *self.required, *self.mtp_layer_keys, *self.unread}
        return {*self._types(), *declared, *IGNORED_KEYS}

    def _check_values(self, stated: Settings, present: Settings) -> None:
        """``CheckpointError`` for missing keys, and for values with which the model would compute other logits."""
        quantization = stated.get("quantization_config")
        if quantization and quantization.get("quant_method") not in (*self.quantized, FP8):
            refuse("quantization_config", quantization, "quantized weights are not supported")
        for key, only in {"is_causal": True, **self.required}.items():
            value = present.get(key, only)
            if value != only and (value or only):  # null may stand for a feature that is off
                refuse(key, value, f"for {self.model_type} only {only!r} is supported")
        missing = [key for key, name in self.keys.items() if key not in stated and name not in OPTIONAL]
        if missing:
            raise CheckpointError(f"config.json has no {', '.join(missing)}; {self.model_type} models need it")

    def config_json(self, config: ModelConfig) -> Settings:
        """The keys of config.json that a model's configuration determines.

        A model without experts has those of an architecture with experts in none of its layers.
        """
        config = config.section(MoEConfig)
        if config.num_experts is None and self.has_experts:
            config = replace(
                config,
                num_experts=2,
                moe_layer_freq=(0,) * config.num_layers,
                moe_ffn_hidden_size=config.ffn_size,
                moe_shared_expert_intermediate_size=config.ffn_size,
                moe_router_topk_scaling_factor=1.0,
            )
        settings = vars(config) | {
            "num_query_groups": config.query_groups,
            "kv_channels": config.head_size,
            "ffn_hidden_size": config.ffn_size,
            "moe_ffn_hidden_size": config.expert_ffn_size,
        }
        keys = {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            **self.required,
            **{key: settings[name] for key, name in self.keys.items()},
        }
        for rule in self.rules:
            keys |= rule.write(config)
        if config.section(ValueHeadConfig).value_head:
            keys |= classifier_keys(self.class_name)
        return keys

    @property
    def has_experts(self) -> bool:
        """Whether config.json must say a number of experts."""
        return "num_experts" in self.keys.values()

    def source(self, name: str) -> TensorSource:
        """The stored tensors that hold our tensor ``name``."""
        if name in CLASSIFIER_TENSORS:
            return TensorSource((CLASSIFIER_TENSORS[name],))
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        table, local_name = (self.layer_tensors, layer[2]) if layer else (self.tensors, name)
        number = int(layer[1]) if layer else 0
        prefix = self.layer_prefix.replace("{n}", str(number // self.parts_of_layer)) if layer else ""
        module, _, parameter = local_name.rpartition(".")
        entry, suffix = (table[local_name], "") if local_name in table else (table.get(module), f".{parameter}")
        if entry is None:
            raise CheckpointError(f"{self.model_type} models have no tensor for {name}")
        return (TensorSource((entry,)) if isinstance(entry, str) else entry).renamed(prefix, suffix, number)

    def constants(self, config: ModelConfig) -> dict[str, float]:
        """Stored names and values of the scalars that all models share."""
        prefixes = (self.layer_prefix.replace("{n}", str(layer)) for layer in range(config.num_layers))
        return {prefix + name: value for prefix in prefixes for name, value in self.layer_constants.items()}

    def mtp_tensors(self, hf_config: Settings, num_layers: int, names: Collection[str]) -> list[str]:
        """The stored tensors among ``names`` of layers for multi-token prediction, which are not read."""
        count = next((hf_config[key] for key in self.mtp_layer_keys if hf_config.get(key)), 0)
        numbers = range(num_layers, num_layers + count)
        prefixes = (self.layer_prefix.replace("{n}", str(number)) for number in numbers)
        stored_prefixes = tuple(prefix for prefix in prefixes if f"{prefix}eh_proj.weight" in names)
        pattern = re.compile(self.mtp_names or "$^")
        return [
            name
            for name in names
            if name.startswith(stored_prefixes) or pattern.fullmatch(name.removeprefix(self.base))
        ]

    def matrices_of_layer(self, number: int) -> Iterator[str]:
        """Names of the stored matrices that layer ``number`` may have; ``{e}`` stands for the expert."""
        for module in self.layer_tensors:
            yield from self.source(f"decoder.layers.{number}.{module}.weight").names

    def changed_settings(self, config: ModelConfig) -> Settings:
        """Settings that the way into config.json and back changes, with the values that come back.

        Errors: ``CheckpointError`` for a value that no config.json of the architecture can have.
        """
        try:
            again = ModelConfig(**self.settings(self.config_json(config)))
        except KeyError as error:
            raise CheckpointError(f"config.json has no word for {error.args[0]!r}") from None
        wanted = function_settings(config)
        return {name: value for name, value in function_settings(again).items() if value != wanted[name]}


def _type_of(setting: str) -> KeyType:
    """The type of a key with the meaning of ``setting``."""
    annotation = field_types()[setting]
    kinds = (_TYPES[python_type] for python_type in _TYPES if python_type in (annotation, *get_args(annotation)))
    return TYPES_OF_SETTINGS.get(setting) or next(kinds, STRING)


def function_settings(config: ModelConfig) -> Settings:
    """The settings that determine the logits of trained weights, with defaults filled in."""
    config = config.section(MoEConfig)
    names = names_by_resume(ModelConfig, Resume.TENSORS, Resume.FUNCTION)
    settings = {name: getattr(config, name) for name in (*names, "moe_shared_expert_intermediate_size")}
    of_attention = ("num_attention_heads", "num_query_groups", "kv_channels", "add_qkv_bias")
    unused: tuple[str, ...] = () if config.may_have_attention else of_attention
    of_mlps = ("ffn_hidden_size", "moe_ffn_hidden_size", *ACTIVATIONS)
    unused += () if config.may_have_mlp else of_mlps
    unused += ("num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size") if config.layers_differ_in_size else ()
    latent = config.section(LatentAttentionConfig)
    has_own_scale = latent.multi_latent_attention or config.section(MuPConfig).use_mup
    scale = None if has_own_scale else config.head_size**-0.5
    return settings | {
        "softmax_scale": config.softmax_scale or scale,
        "group_query_attention": None,
        "num_query_groups": config.query_groups,
        "kv_channels": config.head_size,
        "latent_norm_epsilon": latent.latent_norm_epsilon or config.norm_epsilon,
        "ffn_hidden_size": config.ffn_size,
        "add_qkv_bias": config.has_qkv_bias,
        "window_size": [config.window_of_layer(n) for n in range(config.num_layers)],
        "window_attn_skip_freq": None,
        "linear_attention_freq": [config.is_recurrent(n) for n in range(config.num_layers)],
        "no_rope_freq": [config.has_rotary(n) for n in range(config.num_layers)],
        "moe_layer_freq": [config.has_experts(n) for n in range(config.num_layers)],
        "moe_ffn_hidden_size": config.expert_ffn_size,
        "moe_router_num_groups": None if config.group_score_topk is None else config.moe_router_num_groups,
        "moe_router_group_topk": None if config.group_score_topk is None else config.moe_router_group_topk,
        "moe_router_group_score_topk": config.group_score_topk,
        "mamba_num_heads": Mamba2(config).heads,
        LAYERS_JSON: config.section(HeterogeneousConfig).sized_blocks,
        **dict.fromkeys(unused),
    }


ARCHITECTURES: dict[str, Architecture] = {}
"""By ``model_type``; export takes the first one that can express a model's settings."""


def register(architecture: Architecture, **changes: Any) -> Architecture:
    """Make an architecture, or one that differs from it in some fields, known to import and export, and return it.

    Errors: ``ValueError`` if its ``model_type`` is registered already, or a table names an unknown setting.
    """
    architecture = replace(architecture, **changes)
    if architecture.model_type in ARCHITECTURES:
        raise ValueError(f"model_type {architecture.model_type!r} is registered already")
    unknown = {*architecture.keys.values(), *architecture.fixed} - {f.name for f in fields(extended(ModelConfig))}
    if unknown:
        raise ValueError(f"{architecture.model_type}: ModelConfig has no settings {', '.join(sorted(unknown))}")
    ARCHITECTURES[architecture.model_type] = architecture
    return architecture


def architecture_of(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json.

    Errors: ``CheckpointError`` for an unknown one, with the keys that the nearest known architecture does not have.
    """
    known = ARCHITECTURES.get(str(hf_config.get("model_type")))
    if known is None:
        unplaced = {
            architecture.model_type: sorted(hf_config.keys() - architecture.known_keys())
            for architecture in ARCHITECTURES.values()
        }
        nearest = min(unplaced, key=lambda name: len(unplaced[name]))
        raise CheckpointError(
            f"config.json says model_type={quoted(hf_config.get('model_type'))}, which is not supported; "
            f"docs/hugging_face.md lists those that are; {nearest} is nearest, and has "
            + (f"no key {', '.join(unplaced[nearest])}" if unplaced[nearest] else "all keys of the file")
        )
    return known


def architecture_for(config: ModelConfig, model_type: str | None = None) -> Architecture:
    """The architecture ``model_type``, or by default the first one, that can express a model's settings."""
    exported = [architecture for architecture in ARCHITECTURES.values() if architecture.exported_as is None]
    candidates = exported if model_type is None else [architecture_of({"model_type": model_type})]
    has_experts = config.section(MoEConfig).num_experts is not None
    nearest: tuple[Architecture, Settings] | None = None
    refusals: list[str] = []
    for candidate_architecture in candidates:
        if candidate_architecture.has_experts and not has_experts and model_type is None:
            continue
        try:
            changed = candidate_architecture.changed_settings(config)
        except CheckpointError as error:
            refusals.append(f"{candidate_architecture.model_type}: {error}")
            continue
        if not changed:
            return candidate_architecture
        if nearest is None or len(changed) < len(nearest[1]):
            nearest = candidate_architecture, changed
    tried = ", ".join(candidate.model_type for candidate in candidates)
    reason = f"; {'; '.join(refusals)}" if len(refusals) == len(candidates) else ""
    if nearest:
        faults = (f"{name}={getattr(config, name)}, there {value}" for name, value in nearest[1].items())
        reason = f"; nearest is {nearest[0].model_type}, except for {'; '.join(faults)}"
    raise CheckpointError(f"models of the architecture {tried} cannot have the settings of this model{reason}")


# At the end, because the declarations become architectures of this module.
import_module("megatron_core.hub.hugging_face.declarations")
