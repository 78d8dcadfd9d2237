"""The optimizer's class at stage 3."""

from deepspeed.runtime.base_optimizer import ZeROOptimizer as DeepSpeedZeroOptimizer_Stage3

__all__ = ["DeepSpeedZeroOptimizer_Stage3"]
