"""The settings of an optimizer, and of single parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import nn

from megatron_core import config
from megatron_core.config.refused import refuse_changes, refused
from megatron_core.errors import ConfigError


@dataclass(frozen=True)
class ParamPredicate:
    """A named condition on a parameter; two of the same name are equal."""

    name: str
    fn: Callable[[nn.Parameter], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter) -> bool:
        """Whether it holds."""
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A named condition on a parameter and its name; two of the same name are equal."""

    name: str
    fn: Callable[[nn.Parameter, str], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter, name: str) -> bool:
        """Whether it holds."""
        return self.fn(param, name)


@dataclass(frozen=True)
class ParamKey:
    """Parameters that match any of it: patterns of names, attributes that are true, conditions; each one or a tuple."""

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def matches(self, param: nn.Parameter, param_name: str) -> bool:
        """Whether a parameter is one of them."""
        return (
            any(fnmatch(param_name, pattern) for pattern in _several(self.name))
            or any(getattr(param, name, False) for name in _several(self.attr))
            or any(predicate(param) for predicate in _several(self.predicate))
            or any(predicate(param, param_name) for predicate in _several(self.with_name_predicate))
        )


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass
class OptimizerConfig:
    """Megatron Core's fields and defaults; ``translated`` makes this package's configuration of them.

    ``fp16``, ``bf16`` and ``params_dtype`` are the model's affair and are not read, nor are ``barrier_with_L1_time``,
    ``timers``, ``pin_cpu_grads``, ``pin_cpu_params``, ``store_param_remainders`` and ``overlap_param_gather``, which
    the wrapper of the model has.
    """

    optimizer: str = "adam"
    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    loss_scale: float | None = None
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98
    muon_momentum: float = 0.95
    muon_nesterov: bool = False
    muon_split_qkv: bool = True
    muon_scale_mode: str = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_num_ns_steps: int = 5
    muon_coefficient_type: str = "quintic"
    muon_fp32_matmul_prec: str = "medium"
    muon_tp_mode: Literal["duplicated", "distributed"] = "duplicated"
    muon_scalar_optimizer: str = "adam"
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    store_param_remainders: bool = True
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    barrier_with_L1_time: bool = False
    timers: Any = None
    config_logger_dir: str = ""
    apply_wd_to_qk_layernorm: bool = False
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: torch.dtype = refused(torch.float32)  # noqa: RUF009
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    decoupled_weight_decay: bool = refused(True)
    use_layer_wise_distributed_optimizer: bool = refused(False)
    overlap_param_gather_with_optimizer_step: bool = refused(False)
    log_num_zeros_in_grad: bool = refused(False)
    grad_norm_skip_threshold: float = refused(float("inf"))
    fp8_recipe: str | None = refused(None)
    optimizer_cuda_graph: bool = refused(False)

    def translated(self) -> config.OptimizerConfig:
        """This package's configuration; ConfigError for fields that are set and not supported."""
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
        return config.OptimizerConfig(**values)


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
