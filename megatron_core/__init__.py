"""Megatron's parallelism on plain PyTorch, small enough to read.

Names for Megatron Core's users are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from megatron_core.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_core import parallel_state as mpu
    from megatron_core.distributed import DistributedDataParallel
    from megatron_core.inference_params import InferenceParams
    from megatron_core.model_parallel_config import ModelParallelConfig
    from megatron_core.timers import Timers

_HOMES = {
    "distributed": ("DistributedDataParallel",),
    "inference_params": ("InferenceParams",),
    "model_parallel_config": ("ModelParallelConfig",),
    "package_info": ("__version__",),
    "timers": ("Timers",),
}


def __getattr__(name: str) -> object:
    if name == "mpu":
        return import_module(f"{__name__}.parallel_state")
    return lazy_names(__name__, _HOMES)(name)
