"""The optimizer's class at stage 0 with weights in 16 bits."""

from deepspeed.runtime.base_optimizer import HalfPrecisionOptimizer as BF16_Optimizer

__all__ = ["BF16_Optimizer"]
