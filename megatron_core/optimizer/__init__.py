"""Optimizer, loss scale and learning rate; two names for Megatron Core's users, imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_core.optimizer.megatron_optimizer import MegatronOptimizer, get_megatron_optimizer
    from megatron_core.optimizer.optimizer_config import OptimizerConfig

__all__ = ["MegatronOptimizer", "OptimizerConfig", "get_megatron_optimizer"]

_HOMES = {
    "megatron_optimizer": ("MegatronOptimizer", "get_megatron_optimizer"),
    "optimizer_config": ("OptimizerConfig",),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
