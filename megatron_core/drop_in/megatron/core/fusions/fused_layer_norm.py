"""The norm of a layer's specification with the name of Megatron's fused norm."""

from megatron.core.transformer.torch_norm import WrappedTorchNorm

FusedLayerNorm = WrappedTorchNorm
