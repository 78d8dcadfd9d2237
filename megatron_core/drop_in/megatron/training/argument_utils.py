"""Flags of a dataclass, and configurations from parsed arguments."""

import enum
import types
import typing
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.core.enums import AttnBackend
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig, squared_relu
from megatron.core.transformer.utils import openai_gelu
from megatron.training import from_arguments
from megatron.training.config.container import PretrainConfigContainer
from megatron_core.config.help import field_texts
from megatron_core.errors import ConfigError
from megatron_core.features.layer_sizes.settings import LAYERS_FILE, LAYERS_JSON
from megatron_core.ops.reference import quick_gelu

Kind = TypeVar("Kind")


class TypeInferenceError(ConfigError):
    """argparse cannot parse the type of a field."""


class ArgumentGroupFactory:
    """Adds a flag for each field of a dataclass to a parser, with its type, default and docstring.

    ``metadata={"argparse_meta": {...}}`` of a field overrides arguments of ``add_argument``; its ``arg_names`` names
    the flags. A switch that is on by default becomes ``--no-x`` and ``--disable-x``. Fields in ``exclude`` have no
    flag. Raises ``TypeInferenceError``.
    """

    def __init__(self, src_cfg_class: type, exclude: Sequence[str] | None = None) -> None:
        self.src_cfg_class, self.exclude = src_cfg_class, set(exclude or ())
        self.field_docstrings = field_texts(src_cfg_class)
        self._types = typing.get_type_hints(src_cfg_class)

    def build_group(self, parser: ArgumentParser, title: str | None = None) -> _ArgumentGroup:
        """Add the flags to ``parser`` as a group and return it."""
        group = parser.add_argument_group(title=title, description=self.src_cfg_class.__doc__)
        for attribute in fields(self.src_cfg_class):
            if attribute.name not in self.exclude and attribute.init:
                arguments = self._build_argparse_kwargs_from_field(attribute)
                group.add_argument(*arguments.pop("arg_names"), **arguments)
        return group

    def _format_arg_name(self, config_attr_name: str, prefix: str | None = None) -> str:
        return "--" + "_".join(filter(None, (prefix, config_attr_name))).replace("_", "-")

    def _build_argparse_kwargs_from_field(self, attribute: Field[Any]) -> dict[str, Any]:
        name, given = attribute.name, attribute.metadata.get("argparse_meta")
        factory = attribute.default_factory
        arguments: dict[str, Any] = {
            "arg_names": [self._format_arg_name(name)],
            "dest": name,
            "help": self.field_docstrings.get(name, "").replace("%", "%%"),
            "default": attribute.default if factory is MISSING else factory(),
        }
        try:
            arguments |= self._extract_type(self._types[name])
        except TypeInferenceError:
            if given is None:
                raise
        if arguments.get("type") is bool:
            del arguments["type"]
            arguments["action"] = "store_false" if attribute.default else "store_true"
            if attribute.default:
                arguments["arg_names"] = [self._format_arg_name(name, prefix) for prefix in ("no", "disable")]
        return arguments | (given or {})

    def _extract_type(self, config_type: Any) -> dict[str, Any]:
        origin, options = typing.get_origin(config_type), typing.get_args(config_type)
        if isinstance(config_type, enum.EnumMeta):
            return {"type": config_type.__getitem__, "choices": list(config_type)}
        if config_type is Any:
            return {"type": _number_or_text}
        if isinstance(config_type, type) and origin is None:
            return {"type": config_type}
        if origin in (types.UnionType, typing.Union):
            inner = [option for option in options if option is not type(None)]
            if len(inner) > 1:
                raise TypeInferenceError(f"Unions not supported by argparse: {config_type}; give argparse_meta")
            return self._extract_type(inner[0])
        if origin is typing.Literal:
            return {"type": type(options[0]), "choices": options}
        if origin in (list, tuple) and len({option for option in options if option is not Ellipsis}) == 1:
            count = len(options) if origin is tuple and Ellipsis not in options else "+"
            return self._extract_type(options[0]) | {"nargs": count}
        raise TypeInferenceError(f"Unsupported type: {config_type}; give argparse_meta")


def _number_or_text(word: str) -> int | float | str:
    """The value of a flag whose type is not declared."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _from_args(kind: type[Kind], args: Namespace, **given: Any) -> Kind:
    """Return a dataclass with the attributes of the same names, and ``given``."""
    return kind(**from_arguments.settings_of(kind, args) | given)


def gpt_config_from_args(
    args: Namespace, config: TransformerConfig | None = None, model_config_cls: type[Any] | None = None
) -> Any:
    """Return the settings of the model as a ``GPTModelConfig``, or as its subclass ``model_config_cls``.

    ``args`` has Megatron-LM's names; the default of ``config`` is ``core_transformer_config_from_args(args)``.
    """
    from megatron.training.models.gpt import GPTModelConfig  # imports the model, which other functions do not need

    return _model_from_args(
        model_config_cls or GPTModelConfig, args, config, "transformer_layer_spec", rope_scaling=args.use_rope_scaling
    )


def hybrid_config_from_args(
    args: Namespace, config: TransformerConfig | None = None, model_config_cls: type[Any] | None = None
) -> Any:
    """Return the settings of a hybrid model as a ``HybridModelConfig``; see ``gpt_config_from_args``."""
    from megatron.training.models.hybrid import HybridModelConfig  # imports the model, as above

    return _model_from_args(model_config_cls or HybridModelConfig, args, config, "hybrid_stack_spec")


def _model_from_args(
    kind: type[Any], args: Namespace, config: TransformerConfig | None, spec_field: str, **others: Any
) -> Any:
    spec = getattr(args, "spec", None)
    vocabulary = {"vocab_size": args.padded_vocab_size}
    if args.padded_vocab_size is None:
        vocabulary = {"vocab_size": args.vocab_size, "should_pad_vocab": True}
    return _from_args(
        kind,
        args,
        transformer=core_transformer_config_from_args(args) if config is None else config,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        seq_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        **{spec_field: None if spec is None else import_module(tuple(spec))},
        **vocabulary,
        **others,
    )


def pretrain_cfg_container_from_args(args: Namespace, model_cfg: Any = None) -> PretrainConfigContainer:
    """Return the settings of a run in sections, from Megatron-LM's arguments; ``model_cfg`` becomes ``model``."""
    # Megatron-LM's flags that have other names than the fields.
    switches = ("save_optim", "save_rng", "load_optim", "load_rng")
    given = {name: not getattr(args, f"no_{name}") for name in switches if hasattr(args, f"no_{name}")}
    for name in ("fully_parallel_save", "fully_parallel_load"):
        if hasattr(args, f"ckpt_{name}"):
            given[name] = getattr(args, f"ckpt_{name}")
    others = {
        "checkpoint": given,
        "profiling": {"use_nsys_profiler": getattr(args, "profile", False)},
        "rerun_state_machine": {"check_for_nan_in_loss": getattr(args, "check_for_nan_in_loss_and_grad", True)},
    }
    sections: dict[str, Any] = {
        "optimizer": from_arguments.get_megatron_optimizer_config(args)[0],
        "ddp": from_arguments.get_megatron_ddp_config(args),
        "model": model_cfg,
    }
    for section in fields(PretrainConfigContainer):
        if section.name not in sections:
            kind: Any = section.default_factory
            sections[section.name] = _from_args(kind, args, **others.get(section.name, {}))
    return PretrainConfigContainer(**sections)


def core_transformer_config_from_args(
    args: Namespace, config_class: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """Return the configuration of a model from the result of ``parse_args``."""
    latent = MLATransformerConfig if getattr(args, "multi_latent_attention", False) else TransformerConfig
    named = any(getattr(args, name, None) for name in (LAYERS_JSON, LAYERS_FILE))
    kind = config_class or (HeterogeneousTransformerConfig if named else latent)
    read = lambda name, default=None: getattr(args, name, default)  # noqa: E731
    dtype = torch.float16 if read("fp16") else torch.bfloat16 if read("bf16") else torch.float32
    gated = any(read(name, False) for name in ("swiglu", "geglu", "quick_geglu"))
    gelu = openai_gelu if read("openai_gelu") else quick_gelu if read("quick_geglu") else nn.functional.gelu
    activation = nn.functional.silu if read("swiglu") else squared_relu if read("squared_relu") else gelu
    given = {
        "params_dtype": read("params_dtype", dtype),
        "pipeline_dtype": read("params_dtype", dtype),
        "activation_func": activation,
        "gated_linear_unit": gated,
        "num_query_groups": read("num_query_groups") if read("group_query_attention") else None,
        "add_bias_linear": not read("disable_bias_linear", not read("add_bias_linear", True)),
    }
    kinds = read("cp_comm_type")
    if kinds is not None:
        given["cp_comm_type"] = kinds[0] if len(kinds) == 1 else list(kinds)
    if isinstance(backend := read("attention_backend"), str):
        given["attention_backend"] = AttnBackend.__members__.get(backend, backend)
    return _from_args(kind, args, **given)
