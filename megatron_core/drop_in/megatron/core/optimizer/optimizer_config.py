"""The settings of an optimizer and of selected parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import nn

from megatron.core.mirror import mirror, refuse_changes
from megatron_core import config
from megatron_core.config.optimizers import optimizer_problems
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
        known = {item.name for item in fields(config.OptimizerConfig)}
        if self.lr is None:
            raise ConfigError("OptimizerConfig: lr=None; give the learning rate")
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name in known}
        values |= {"min_lr": self.min_lr or 0.0, "loss_scale_window": int(self.loss_scale_window)}
        values["optimizer_offload_fraction"] = self.optimizer_offload_fraction or 1.0
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if values.get(name) not in _DTYPES:
                raise ConfigError(f"OptimizerConfig: {name}={values.get(name)} is none of {list(_DTYPES)}")
            values[name] = _DTYPES[values[name]]
        kinds = get_type_hints(config.OptimizerConfig) | {"muon_tp_mode": get_type_hints(type(self))["muon_tp_mode"]}
        for name, value in (values | {"muon_tp_mode": self.muon_tp_mode}).items():
            if (legal := get_args(kinds[name])) and isinstance(legal[0], str) and value not in legal:
                raise ConfigError(f"OptimizerConfig: {name}={value!r} is not supported; legal: {', '.join(legal)}")
        own = config.OptimizerConfig(**values)
        if faults := list(optimizer_problems(own)):
            raise ConfigError(f"OptimizerConfig: {faults[0]}")
        return own


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
