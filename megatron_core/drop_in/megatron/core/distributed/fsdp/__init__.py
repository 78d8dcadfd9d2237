"""Megatron FSDP, which is not supported under this name."""
