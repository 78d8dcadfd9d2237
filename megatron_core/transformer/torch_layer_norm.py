"""For Megatron Core's users: torch's norms under their former path."""

from megatron_core.transformer.torch_norm import WrappedTorchNorm

WrappedTorchLayerNorm = WrappedTorchNorm
