"""What every operation computes, in PyTorch: the specification of the native bodies, good in any precision.

These serve where no native body does, with PyTorch's own backward; so where PyTorch has the function, they are it.
"""

from megatron_core.ops.reference.norm import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
