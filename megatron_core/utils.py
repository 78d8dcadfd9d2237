"""For Megatron Core's users: small functions about groups, models and initial weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.parallel.groups import Group
from megatron_core.parallel.initialization import Normal
from megatron_core.tensor_parallel.splitting import divide

__all__ = [
    "divide",
    "ensure_divisibility",
    "get_attr_wrapped_model",
    "get_model_config",
    "get_pg_rank",
    "get_pg_size",
    "get_tensor_model_parallel_group_if_none",
    "init_method_normal",
    "is_te_min_version",
    "is_torch_min_version",
    "log_single_rank",
    "scaled_init_method_normal",
    "unwrap_model",
]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """LayoutError, an AssertionError, if there is a remainder."""
    divide(numerator, denominator)


def get_tensor_model_parallel_group_if_none(
    tp_group: Group | None, is_expert: bool = False, check_initialized: bool = True
) -> Group | None:
    """``tp_group``, or that of the current layout for dense layers or experts; None without torch.distributed."""
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized)
    return parallel_state.get_tensor_model_parallel_group(check_initialized)


def get_pg_size(group: Group | None = None) -> int:
    """Ranks of a group; 1 for None or without torch.distributed."""
    return 1 if group is None or not dist.is_initialized() else group.size()


def get_pg_rank(group: Group | None = None) -> int:
    """This rank's index in a group; 0 for None or without torch.distributed."""
    return 0 if group is None or not dist.is_initialized() else group.rank()


def get_attr_wrapped_model(model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False) -> Any:
    """An attribute of the first model, from outside to inside of its wrappers, that has it, or that model itself."""
    if isinstance(model, list):
        raise ConfigError("get_attr_wrapped_model takes one model; call it for each chunk")
    inner = model
    while not hasattr(inner, attr) or (not allow_none and getattr(inner, attr) is None):
        if not hasattr(inner, "module"):
            raise ConfigError(f"couldn't find attribute {attr} in {type(model).__name__}")
        inner = inner.module
    return inner if return_model_obj else getattr(inner, attr)


def get_model_config(model: Any) -> Any:
    """The model's ``config``."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def unwrap_model(model: Any, module_instances: tuple[type, ...] | None = None) -> Any:
    """The models inside their wrappers (whatever has a ``module``); a list for a list."""
    if isinstance(model, list | tuple):
        return [unwrap_model(one, module_instances) for one in model]
    while hasattr(model, "module") and (module_instances is None or isinstance(model, module_instances)):
        model = model.module
    return model


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """N(0, sigma)."""
    return Normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Callable[[Tensor], Tensor]:
    """N(0, sigma / sqrt(multiplier x num_layers))."""
    return Normal(sigma / math.sqrt(multiplier * num_layers))


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether torch is of ``version`` or later; strictly later without ``check_equality``."""
    own = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    wanted = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return own >= wanted if check_equality else own > wanted


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """False: models of this package do not consist of Transformer Engine's modules."""
    return False


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """``logger.log(...)`` on one rank."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.log(*args, **kwargs)
