"""Ranges in a trace."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator

enable_nvtx = True
"""Whether ``instrument_w_nvtx`` records ranges."""


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Record a range for each call of ``func``, except in code that torch compiles."""

    @wraps(func)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not enable_nvtx or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return recorded
