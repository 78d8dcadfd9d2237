"""Norms, clipping and a line about memory, as programs import them."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import log_dist

GIB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """With ``force``, log ``message`` with the memory in use and its peak on rank 0."""
    if force:
        device = get_accelerator()
        current, peak = device.memory_allocated() / GIB, device.max_memory_allocated() / GIB
        log_dist(f"{message}: memory {current:.2f} GiB, peak {peak:.2f} GiB", ranks=[0])


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale ``parameter.grad`` so that their norm is at most ``max_norm``; return the norm before.

    It is for programs without an engine: an engine clips its own gradients (``gradient_clipping``).
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_grad_norm(parameters: Iterable[nn.Parameter] | nn.Parameter, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Return the norm of ``parameter.grad`` of this rank."""
    each = [parameters] if isinstance(parameters, Tensor) else parameters
    return torch.nn.utils.get_total_norm([p.grad for p in each if p.grad is not None], norm_type)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the norm of the norms."""
    return float(sum(float(norm) ** 2.0 for norm in norm_list) ** 0.5)


def get_global_norm_of_tensors(
    input_tensors: Iterable[Tensor], norm_type: float = 2, mpu: Any = None, **_: Any
) -> Tensor:
    """Return the norm of tensors of this rank."""
    return torch.nn.utils.get_total_norm(list(input_tensors), norm_type)


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the only value of ``items``; ``RuntimeError`` if there are several."""
    unique = set(items)
    if len(unique) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {items}")
    return unique.pop()


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def is_model_parallel_parameter(parameter: Any) -> bool:
    """Whether a parameter is split over model-parallel ranks."""
    return bool(getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False))


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch's version is in the range."""
    version = torch.torch_version.TorchVersion(torch.__version__)
    return not (
        (min_version is not None and version < str(min_version))
        or (max_version is not None and version > str(max_version))
    )


def get_ma_status() -> int:
    """Bytes in use on rank 0, 0 on others."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return get_accelerator().memory_allocated() if is_first else 0


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text, such as ``name(1, key=2)``."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Return the sums of the first 1, 2, ... weights."""
    return list(accumulate(weights))
