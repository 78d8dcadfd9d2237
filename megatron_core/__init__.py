"""Megatron's parallelism on plain PyTorch, small enough to read.

Names for Megatron Core's users are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron_core.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_core import parallel_state as mpu
    from megatron_core.distributed import DistributedDataParallel
    from megatron_core.inference_params import InferenceParams
    from megatron_core.model_parallel_config import ModelParallelConfig
    from megatron_core.package_info import __version__
    from megatron_core.timers import Timers

__getattr__ = lazy_names(__name__, __file__)
