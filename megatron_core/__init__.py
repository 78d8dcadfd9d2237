"""Megatron's parallelism, a tenth of its size, on plain PyTorch.

Names for Megatron Core's users are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_core import parallel_state as mpu
    from megatron_core.model_parallel_config import ModelParallelConfig
    from megatron_core.timers import Timers

__all__ = ["ModelParallelConfig", "Timers", "mpu"]

_HOMES = {"model_parallel_config": ("ModelParallelConfig",), "timers": ("Timers",)}


def __getattr__(name: str) -> object:
    if name == "mpu":
        return import_module(f"{__name__}.parallel_state")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
