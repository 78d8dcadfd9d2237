"""Megatron's parallelism, a tenth of its size, on plain PyTorch."""
