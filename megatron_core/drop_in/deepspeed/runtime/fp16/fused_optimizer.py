"""The optimizer's class at stage 0 with weights in 16 bits."""

from deepspeed.runtime.base_optimizer import HalfPrecisionOptimizer as FP16_Optimizer

__all__ = ["FP16_Optimizer"]
