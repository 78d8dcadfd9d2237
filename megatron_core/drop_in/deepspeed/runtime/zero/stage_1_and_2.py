"""The optimizer's class at stages 1 and 2."""

from deepspeed.runtime.base_optimizer import ZeROOptimizer as DeepSpeedZeroOptimizer

__all__ = ["DeepSpeedZeroOptimizer"]
