"""Offload to disk."""

from deepspeed.runtime.swap_tensor.sizes import MIN_SWAPPABLE_BYTES as MIN_SWAPPABLE_BYTES
