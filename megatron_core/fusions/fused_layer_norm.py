"""For Megatron Core's users: the norm of a layer's specification under the name of Megatron's fused one."""

from megatron_core.transformer.torch_norm import WrappedTorchNorm

FusedLayerNorm = WrappedTorchNorm
