"""Whole weights, gradients and optimizer state of parameters, at every ZeRO stage.

The functions with ``full`` are collectives: all ranks call them with the same parameters. They return None for a
parameter that is not trained. The functions with ``local`` read and write this rank's part: the flat parameter in
equal parts for the data-parallel ranks, the last one padded by zeros.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.runtime.zero.partition_parameters import engine_of
from megatron_core.any_model import Engine

FP32 = "fp32"
Update = Callable[[Tensor, nn.Parameter], Tensor]


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole float32 weights."""
    engine = _trains(param)
    return None if engine is None else engine.whole.weights(param).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the float32 weights and the weights of the model."""
    if (engine := _trains(param)) is not None:
        engine.whole.set_weights(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return whole optimizer state, such as ``exp_avg``; ``fp32`` is the weights."""
    if optim_state_key == FP32:
        return safe_get_full_fp32_param(param)
    engine = _trains(param)
    return None if engine is None else engine.whole.state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace whole optimizer state."""
    if optim_state_key == FP32:
        safe_set_full_fp32_param(param, value)
    elif (engine := _trains(param)) is not None:
        engine.whole.set_state(param, optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient, averaged over the ranks, after ``backward`` and before ``step``."""
    engine = _trains(param)
    return None if engine is None else engine.whole.gradient(param)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the whole gradient, after ``backward`` and before ``step``."""
    if (engine := _trains(param)) is not None:
        engine.whole.set_gradient(param, value)


def safe_update_full_grad_vectorized(param_list: Sequence[nn.Parameter], update_func: Update) -> None:
    """Replace the gradient of each parameter by ``update_func(gradient, parameter)``."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the float32 weights."""
    return _part(param, safe_get_full_fp32_param(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of optimizer state."""
    return _part(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the gradient."""
    return _part(param, safe_get_full_grad(param))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of the weights; all ranks call it together."""
    safe_set_full_fp32_param(param, _assembled(param, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of optimizer state; all ranks call it together."""
    safe_set_full_optimizer_state(param, _assembled(param, value), optim_state_key)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of the gradient; all ranks call it together."""
    safe_set_full_grad(param, _assembled(param, value))


def _trains(param: nn.Parameter) -> Engine | None:
    return engine_of(param) if param.requires_grad else None


def _part(param: nn.Parameter, whole: Tensor | None) -> Tensor | None:
    if whole is None:
        return None
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = -(-whole.numel() // ranks)
    flat = nn.functional.pad(whole.flatten(), (0, size * ranks - whole.numel()))
    return flat[rank * size : (rank + 1) * size].clone()


def _assembled(param: nn.Parameter, value: Tensor) -> Tensor:
    whole = torch.empty(value.numel() * dist.get_world_size(), dtype=value.dtype, device=value.device)
    dist.all_gather_into_tensor(whole, value.flatten().contiguous())
    return whole[: param.numel()].view(param.shape)
