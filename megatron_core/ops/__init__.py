"""Fused operations: the native bodies of csrc as torch operators, and a reference in PyTorch for each."""

from megatron_core.ops.backend import Backend
from megatron_core.ops.layer_norm import add_layer_norm, layer_norm
from megatron_core.ops.rms_norm import add_rms_norm, rms_norm

__all__ = ["Backend", "add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
