"""The settings of an optimizer and of selected parameters."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from importlib import import_module
from typing import Any, Literal, TypedDict, get_args, get_type_hints

import torch
from torch import nn

from megatron.core.mirror import mirror, refuse_changes
from megatron_core import config
from megatron_core.config.optimizers import optimizer_kinds, optimizer_problems
from megatron_core.config.run import field_types
from megatron_core.errors import ConfigError


@dataclass(frozen=True)
class ParamPredicate:
    """A named condition on a parameter; conditions with the same name are equal."""

    name: str
    fn: Callable[..., bool] = field(compare=False)

    def __call__(self, *arguments: Any) -> bool:
        """Return whether the condition holds."""
        return self.fn(*arguments)


class ParamWithNamePredicate(ParamPredicate):
    """A named condition on a parameter and its name; conditions with the same name are equal."""


@dataclass(frozen=True)
class ParamKey:
    """Selects parameters that match any of the given name patterns, true attributes and conditions.

    Each argument is one value or a tuple.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def matches(self, param: nn.Parameter, param_name: str) -> bool:
        """Return whether the key selects a parameter."""
        return (
            any(fnmatch(param_name, pattern) for pattern in _several(self.name))
            or any(getattr(param, name, False) for name in _several(self.attr))
            or any(predicate(param) for predicate in _several(self.predicate))
            or any(predicate(param, param_name) for predicate in _several(self.with_name_predicate))
        )


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass
class OptimizerConfig(mirror("OptimizerConfig")):  # type: ignore[misc]
    """Megatron Core's fields and defaults; ``translated`` converts them to the engine's configuration.

    The model determines ``fp16``, ``bf16`` and ``params_dtype``, and its wrapper ``overlap_param_gather``; they are not
    read here.
    """

    params_dtype: torch.dtype = torch.float32
    muon_tp_mode: Literal["duplicated", "distributed"] = "duplicated"
    main_grads_dtype: torch.dtype = field(default=torch.float32, metadata={"refused": True})
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32

    def translated(self) -> config.OptimizerConfig:
        """Return the engine's configuration; ConfigError for unsupported settings."""
        refuse_changes(self)
        known = vars(config.OptimizerConfig())
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name in known}
        values |= {name: getattr(self, name) or 0.0 for name in ("lr", "min_lr")}
        values |= {"loss_scale_window": int(self.loss_scale_window)}
        values["optimizer_offload_fraction"] = self.optimizer_offload_fraction or 1.0
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if values.get(name) not in _DTYPES:
                raise ConfigError(f"OptimizerConfig: {name}={values.get(name)} is none of {list(_DTYPES)}")
            values[name] = _DTYPES[values[name]]
        kinds = field_types() | {"muon_tp_mode": get_type_hints(type(self))["muon_tp_mode"]}
        for name, value in (values | {"muon_tp_mode": self.muon_tp_mode}).items():
            if (legal := get_args(kinds[name])) and isinstance(legal[0], str) and value not in legal:
                raise ConfigError(f"OptimizerConfig: {name}={value!r} is not supported; legal: {', '.join(legal)}")
        own = config.OptimizerConfig(**values)
        if faults := list(optimizer_problems(own)):
            raise ConfigError(f"OptimizerConfig: {faults[0]}")
        return own


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class ParamGroupOverride(TypedDict, total=False):
    """Settings of a parameter group that replace the common ones."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float
    eps: float
    optimizer: str


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the overrides of a standard run.

    Vectors have no weight decay, except norms of queries and keys with ``apply_wd_to_qk_layernorm``. With
    ``decoupled_lr`` embeddings and output layer have these learning rates.
    """

    def is_plain_vector(param: nn.Parameter, name: str) -> bool:
        norms = config.apply_wd_to_qk_layernorm and ("q_layernorm." in name or "k_layernorm." in name)
        return (param.dim() == 1 or name.endswith(".bias")) and not norms

    vectors = ParamWithNamePredicate("vectors", is_plain_vector)
    overrides: dict[ParamKey, ParamGroupOverride] = {ParamKey(with_name_predicate=vectors): {"wd_mult": 0.0}}
    if config.decoupled_lr is not None:
        rates = {"max_lr": config.decoupled_lr, "min_lr": config.decoupled_min_lr}
        given: Any = {name: value for name, value in rates.items() if value is not None}
        overrides[ParamKey(attr="is_embedding_or_output_parameter")] = given
    return overrides


def get_mup_config_overrides(
    config: OptimizerConfig, mup_width_mult: float, optimizer_type: str = "adam"
) -> dict[ParamKey, ParamGroupOverride]:
    """Return the overrides of maximal update parametrization, from the optimizer's row; none at width 1.

    With ``decoupled_lr`` the learning rates of embeddings and output layer do not change.
    """
    kind = optimizer_type.lower()
    if "muon" in kind and config.muon_scale_mode == "spectral":
        optimizer: Any = import_module("megatron.core.optimizer")  # programs replace its function
        optimizer.log_single_rank(
            logging.getLogger(__name__),
            logging.WARNING,
            "Both MuP and muon_scale_mode=spectral are enabled. Muon scales the matrices that it updates by its own "
            "spectral factor; Megatron-LM's alternative is --muon-scale-mode unit_rms_norm.",
        )
    if mup_width_mult == 1.0:
        return {}
    family = "sgd" if kind == "sgd" else "muon" if "muon" in kind else "adam" if "adam" in kind else kind
    kinds = optimizer_kinds()
    row = kinds.get(config.muon_scalar_optimizer if family == "muon" else family)
    if row is None:
        raise ConfigError(f"optimizer_type={optimizer_type!r} is unknown; legal: {', '.join(kinds)}")
    overrides: dict[ParamKey, ParamGroupOverride] = {}
    for hidden in (True, False):
        lr, eps = row.width_factors(mup_width_mult, hidden=hidden)
        rates = {"max_lr": config.lr, "min_lr": config.min_lr} if lr != 1.0 else {}
        override: Any = {name: value * lr for name, value in rates.items() if value is not None}
        override |= {"eps": config.adam_eps * eps} if eps != 1.0 and family == "adam" else {}
        if override:
            key = ParamWithNamePredicate(f"mup {'hidden' if hidden else 'other'}", _of_class(config, family, hidden))
            overrides[ParamKey(with_name_predicate=key)] = override
    return overrides


def _of_class(config: OptimizerConfig, family: str, hidden: bool) -> Callable[[nn.Parameter, str], bool]:
    def matches(param: nn.Parameter, name: str) -> bool:
        if config.decoupled_lr is not None and getattr(param, "is_embedding_or_output_parameter", False):
            return False
        embedding = getattr(param, "is_embedding_parameter", "embedding" in name.lower())
        embedding = embedding or getattr(param, "shared_embedding", False)
        of_muon = family == "muon" and is_managed_by_layer_wise_optimizer(param)
        return not of_muon and (param.dim() > 1 and not embedding) is hidden

    return matches


def is_managed_by_layer_wise_optimizer(param: nn.Parameter) -> bool:
    """Whether Muon updates a parameter: a hidden matrix that is not marked ``use_muon=False``."""
    excluded = getattr(param, "is_embedding_or_output_parameter", False) or not getattr(param, "use_muon", True)
    return param.dim() == 2 and not excluded


def combine_param_group_overrides(overrides: Iterable[ParamGroupOverride | None]) -> ParamGroupOverride:
    """Return all settings together; ConfigError if two of them differ."""
    combined: dict[str, Any] = {}
    for override in overrides:
        for name, value in (override or {}).items():
            if combined.setdefault(name, value) != value:
                raise ConfigError(f"two overrides of {name}: {combined[name]} and {value}; remove one")
    return ParamGroupOverride(**combined)  # type: ignore[typeddict-item]
