"""The norm of a layer's specification under the name of Megatron's fused one."""

from megatron.core.transformer.torch_norm import WrappedTorchNorm

FusedLayerNorm = WrappedTorchNorm
