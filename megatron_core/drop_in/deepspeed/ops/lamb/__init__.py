"""LAMB under DeepSpeed's name."""

from deepspeed.ops.lamb.fused_lamb import FusedLamb as FusedLamb
